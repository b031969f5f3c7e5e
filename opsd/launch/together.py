"""Puts the parts of a launcher with fellows together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opsd.checkpoints import lease
from opsd.launch.cluster import ClusterRun
from opsd.launch.failure import RestartPolicy
from opsd.launch.fellows import Fellows
from opsd.launch.head import Head, Shape
from opsd.launch.quorum.node import TcpQuorum
from opsd.launch.run_log import RunLog
from opsd.launch.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class FolderFence:
    """Claims generations in the run's folder, for this launcher of this job."""

    folder: Path
    run: str
    job: str
    node: str

    def claim(self, number: int) -> bool:
        """See ``Fence.claim``."""
        return lease.claim(self.folder, number, {"run": self.run, "job": self.job, "node": self.node})


def with_fellows(
    node: Supervisor, fellows: Fellows, shape: Shape, secret: bytes, first_number: int, timeout_s: float
) -> ClusterRun:
    """The control of a run on the nodes of ``fellows``; its first generation has ``first_number`` or a higher one."""
    settings, folder = node.settings, node.folders.folder
    quorum = TcpQuorum(
        fellows.own,
        fellows.members,
        run=settings.run,
        secret=secret,
        loop=node.loop,
        first_number=first_number,
        timeout_s=timeout_s,
    )

    def new_head() -> Head:
        policy = RestartPolicy(
            settings.max_restarts, same_limit=settings.same_failures, refill_steps=settings.refill_steps
        )
        log = RunLog(settings.run, settings.node, folder / "events.jsonl")
        return Head(shape, quorum, node.loop, policy, log, lambda _code, _reason, _bad: None)

    fence = FolderFence(folder, settings.run, settings.job, settings.node)
    return ClusterRun(node, quorum, new_head=new_head, fence=fence, join_s=shape.join_s)
