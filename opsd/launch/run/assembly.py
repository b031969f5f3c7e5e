"""Assembles a launcher from its parts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

from opsd.launch.claims.tcp_group import TcpGroup
from opsd.launch.hangs.recorder import RecorderJudge
from opsd.launch.io.reporting import WorkQueue
from opsd.launch.io.run_log import EventRecord, LocalRunLog, RunEventLog, RunLog
from opsd.launch.ranks.failure import RestartPolicy
from opsd.launch.run.announcer import Announcer, agent_page, opening_block
from opsd.launch.run.cluster import ClusterRun
from opsd.launch.run.job_end import EnclosingJob as EnclosingJob
from opsd.launch.run.launchers import Launchers, is_single_attempt, start_of
from opsd.launch.run.leader import Leader
from opsd.launch.run.nodes import RunShape
from opsd.launch.run.supervisor import Supervisor


def assemble_run(
    node: Supervisor, launchers: Launchers, shape: RunShape, secret: bytes, timeout_s: float, port: int | None,
    ready: Callable[[], str],
) -> ClusterRun:  # fmt: skip
    """The control of a run on the nodes of ``launchers``, one or several.

    ``port`` is MASTER_PORT if the first node is this one, None for a free port per generation. ``ready`` returns why
    this node must not replace another, "" if it may.
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
            same_limit=settings.same_failures,
            refill_steps=settings.refill_steps,
            asked=settings.restarts_asked,
        )
        alone = len(launchers.members) == 1
        log: RunEventLog = (
            LocalRunLog(node.events) if alone else RunLog(settings.run, settings.node, folder / "events.jsonl", work)
        )
        announcer = Announcer(log, opening if node.state == "waiting" else None)
        return Leader(shape, group, node.loop, policy, announcer, over, RecorderJudge(folder, node.loop))

    job = EnclosingJob(os.environ, folder / "requeue.log")
    return ClusterRun(
        node, group, shape, new_leader=new_leader, job=job, ready=ready, borrowed=launchers.borrowed, port=port
    )
