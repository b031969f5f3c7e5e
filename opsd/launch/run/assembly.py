"""Assembles a launcher from its parts, the end of its Slurm job among them."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsd.launch.claims.tcp_group import TcpGroup
from opsd.launch.hangs.recorder import RecorderJudge
from opsd.launch.io.handshake import host_is_up
from opsd.launch.io.reporting import WorkQueue, print_message
from opsd.launch.io.run_log import BATCH_HOST, EventRecord, LocalRunLog, RunEventLog, RunLog
from opsd.launch.ranks.failure import RestartPolicy
from opsd.launch.run.announcer import LOOK_S, Announcer, Notices, agent_page, opening_block
from opsd.launch.run.cluster import ClusterRun
from opsd.launch.run.launchers import Launchers, is_single_attempt, start_of
from opsd.launch.run.leader import Leader
from opsd.launch.run.nodes import RunShape
from opsd.launch.run.readiness import given_back_at, is_lemon
from opsd.launch.run.supervisor import Supervisor
from opsd.slurm.allocation import AllocationError, allocation, in_job
from opsd.slurm.connect import choose
from opsd.slurm.port import Slurm, SlurmError
from opsd.slurm.requeue import ExcludedNodes
from opsd.slurm.requeue_helper import end_job

SSH = 22


@dataclass(frozen=True, slots=True)
class EnclosingJob:
    """The Slurm job that this launcher belongs to, if any; ``log`` is a file in the run's folder.

    ``is_up`` is whether the host of that name answers on one of these ports.
    """

    environ: Mapping[str, str]
    log: Path
    connect: Callable[[], Slurm] = lambda: choose().slurm
    is_up: Callable[[str, Sequence[int]], bool] = host_is_up

    def end(self, code: int, lost: tuple[str, ...], unfit: tuple[str, ...]) -> bool:
        """Requeue the job without the nodes it lost; end it with ``code`` if the run is over and its script is dead.

        While the batch script lives, it handles the end. A borrowed node that is gone is no loss of this job. The
        batch host may have died before its launcher joined the run, which then has not lost it.
        """
        host = self.environ.get(BATCH_HOST)
        if not in_job(self.environ) or (host is None and not lost):
            return False
        try:
            if host is not None and host not in lost:
                if self.is_up(host, self._ports()):
                    return False
                lost = (*lost, host)
            job = allocation(self.environ)
            lost = tuple(name for name in lost if name in job.nodes)
            if not lost:
                return False
            end_job(self.connect(), job, code, ExcludedNodes(lost, unfit), self.log, print_message)
        except (SlurmError, AllocationError) as error:
            print_message(f"Slurm: {error}")
        return True

    def _ports(self) -> Sequence[int]:
        """Those of slurmd, which every node of a job reaches on the others, and of ssh. Raises SlurmError."""
        slurmd = re.findall(r"\d+", self.connect().configuration().get("SlurmdPort", ""))
        return (*map(int, slurmd[:1]), SSH)


def assemble_run(
    node: Supervisor, launchers: Launchers, shape: RunShape, secret: bytes, timeout_s: float, port: int | None,
    ready: Callable[[], str], notices: Notices, *, replaces: int | None = None,
) -> ClusterRun:  # fmt: skip
    """The control of a run on the nodes of ``launchers``, one or several.

    ``port`` is MASTER_PORT if the first node is this one, None for a free port per generation. ``ready`` returns why
    this node must not replace another, "" if it may. ``replaces``: see ``replaceable``.
    """
    settings, folder = node.settings, node.folders.folder
    launcher = f"{settings.node}-{os.getpid()}-{secrets.token_hex(4)}"
    group = TcpGroup(
        launchers.own,
        launchers.members,
        folder,
        node.loop,
        start=start_of(settings.run, os.environ, launchers, launcher),
        launcher=launcher,
        secret=secret,
        size=settings.local_size,
        once=is_single_attempt(os.environ),
        replaces=replaces,
        timeout_s=timeout_s,
    )

    work = WorkQueue("events of the run")

    def opening(event: EventRecord) -> str:
        page = agent_page(settings.run, settings.node)
        return opening_block(
            settings.run, event, folder=folder, logs=node.folders.logs, page=page, resume=settings.resume
        )

    def new_leader(over: Callable[[int, str, tuple[str, ...], tuple[str, ...]], None]) -> Leader:
        policy = RestartPolicy(
            settings.max_restarts,
            same_limit=settings.max_same_failures,
            refill_steps=settings.refill_steps,
            asked=settings.restarts_asked,
        )
        alone = len(launchers.members) == 1
        log: RunEventLog = (
            LocalRunLog(node.events) if alone else RunLog(settings.run, settings.node, folder / "events.jsonl", work)
        )
        announcer = Announcer(log, opening if node.state == "waiting" else None, notices)
        recorder = RecorderJudge(folder, node.loop)
        leader = Leader(shape, group, node.loop, policy, announcer, over, recorder, announcer.interrupted)
        notices.lead(lambda: leader.furthest)
        return leader

    job = EnclosingJob(os.environ, folder / "requeue.log")
    run = ClusterRun(
        node, group, shape, new_leader=new_leader, job=job, ready=ready, given_back=given_back_at, lemon=is_lemon,
        borrowed=launchers.borrowed, port=port,
    )  # fmt: skip

    def look() -> None:
        if run.led:
            notices.look()

    node.loop.every(LOOK_S, look)
    return run
