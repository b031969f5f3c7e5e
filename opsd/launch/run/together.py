"""Puts the parts of a launcher with fellows together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opsd import exitcodes
from opsd.launch.claims.fence import FolderFence
from opsd.launch.io.messages import say
from opsd.launch.io.run_log import RunLog
from opsd.launch.quorum.node import TcpQuorum
from opsd.launch.ranks.failure import RestartPolicy
from opsd.launch.run.cluster import ClusterRun
from opsd.launch.run.fellows import Fellows, start_of
from opsd.launch.run.head import Head
from opsd.launch.run.placement import Shape
from opsd.launch.run.supervisor import Supervisor
from opsd.slurm.allocation import AllocationError, allocation, in_job
from opsd.slurm.attendant import requeue_from_inside
from opsd.slurm.connect import choose
from opsd.slurm.port import Slurm, SlurmError
from opsd.slurm.requeue import Without


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """Ends the Slurm job that this launcher is part of, if it is, where nobody else does."""

    environ: Mapping[str, str]
    log: Path
    connect: Callable[[], Slurm] = lambda: choose().slurm

    def end(self, code: int, lost: tuple[str, ...], unfit: tuple[str, ...]) -> None:
        """Put the job back into the queue without what it has lost; end it if its batch script has died.

        Otherwise the batch script sees to the end. Guests that are gone are no loss of the job.
        """
        if not lost or not in_job(self.environ):
            return
        try:
            job = allocation(self.environ)
            lost = tuple(name for name in lost if name in job.nodes)
            if not lost:
                return
            slurm = self.connect()
            if code == exitcodes.REQUEUE:
                requeue_from_inside(slurm, job, Without(lost, unfit), log=str(self.log), say=say)
            elif any(found.batch_host in lost for found in slurm.jobs([job.job])):
                say(f"the batch script of job {job.job} died with its node; cancelling the job, which is done")
                slurm.cancel(job.job)
        except (SlurmError, AllocationError) as error:
            say(f"Slurm: {error}")


def with_fellows(
    node: Supervisor,
    fellows: Fellows,
    shape: Shape,
    secret: bytes,
    first_number: int,
    timeout_s: float,
    ready: Callable[[], str],
) -> ClusterRun:
    """The control of a run on the nodes of ``fellows``; its first generation has ``first_number`` or a higher one.

    ``ready`` says why this node must not take another's place, "" if it may.
    """
    settings, folder = node.settings, node.folders.folder
    start = start_of(settings.run, os.environ)
    quorum = TcpQuorum(
        fellows.own,
        fellows.members,
        run=start,
        secret=secret,
        loop=node.loop,
        first_number=first_number,
        timeout_s=timeout_s,
    )

    def new_head(over: Callable[[tuple[str, ...], tuple[str, ...]], None]) -> Head:
        policy = RestartPolicy(
            settings.max_restarts, same_limit=settings.same_failures, refill_steps=settings.refill_steps
        )
        log = RunLog(settings.run, settings.node, folder / "events.jsonl")
        return Head(shape, quorum, node.loop, policy, log, over)

    fence = FolderFence.of_job(folder, settings, start)
    job = SlurmJob(os.environ, folder / "requeue.log")
    return ClusterRun(
        node,
        quorum,
        new_head=new_head,
        fence=fence,
        job=job,
        ready=ready,
        guest=fellows.guest,
        waits=shape.wait_s > 0,
        join_s=shape.join_s,
    )
