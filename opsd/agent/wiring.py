"""Build the agent from its settings."""

from __future__ import annotations

import time
from functools import cache

from opsd.agent import collectors
from opsd.agent.actions import Executor, Notifier
from opsd.agent.annotate import Annotator
from opsd.agent.journal import Journal
from opsd.agent.judge import Judge
from opsd.agent.logs import Log
from opsd.agent.loop import Loop
from opsd.agent.notify import Announcer, LogNotifier, WebhookNotifier
from opsd.agent.policy import Limits
from opsd.agent.responder import Listener, Responder
from opsd.agent.window import Window
from opsd.collectors import witnesses
from opsd.collectors.nvml import NvmlSettings, PowerControl
from opsd.collectors.ranks import RanksSettings
from opsd.config import Settings
from opsd.runbooks import RUNBOOKS
from opsd.slurm.connect import choose
from opsd.slurm.deferred import DeferredUpdates
from opsd.slurm.drainer import SlurmDrainer
from opsd.slurm.ownership import Rules


def build_journal(settings: Settings, log: Log) -> Journal:
    """The journal in the state folder; the log says when writing fails and when it works again."""

    def say(problem: str) -> None:
        if problem:
            log.error("journal is not written", problem=problem)
        else:
            log.info("journal is written", folder=str(settings.agent.state_dir))

    return Journal(settings.agent.state_dir, say)


def _drainer(settings: Settings) -> SlurmDrainer:
    """Drains this node through this machine's Slurm, which is looked up on use."""
    slurm = cache(lambda: choose().slurm)
    updates = DeferredUpdates(settings.agent.state_dir)
    return SlurmDrainer(slurm, settings.agent.node, Rules.of(settings.policy), updates)


def _listeners(settings: Settings, notifier: Notifier, log: Log) -> list[Listener]:
    """The listeners of every change of an incident: notifications and Grafana."""
    told: list[Listener] = []
    notify, node = settings.notify, settings.agent.node
    if notify.receiver:
        told.append(Announcer(notifier, node, log, muted=Limits.of(settings.policy).muted))
    if notify.grafana_url:
        told.append(Annotator(notify.grafana_url, notify.grafana_token_file, node, log))
    return told


def build_loop(settings: Settings, journal: Journal, log: Log) -> Loop:
    """The loop with everything connected, before the first collection."""
    agent, policy, receiver = settings.agent, settings.policy, settings.notify.receiver
    nvml = settings.section(NvmlSettings)
    notifier: Notifier = WebhookNotifier(log, receiver) if receiver else LogNotifier(log)
    executor = Executor(
        shm=settings.section(RanksSettings).root,
        notify=notifier,
        set_power_limit=PowerControl(nvml.library).set_power_limit if nvml.enabled else None,
        drain_node=_drainer(settings) if policy.drain else None,
        before_acting=lambda: journal.flush(1.0),
    )
    judge = Judge(RUNBOOKS, log, hold_s=policy.hold_s, max_relapses=policy.max_relapses)
    limits = Limits.of(policy)
    responder = Responder(
        judge,
        executor,
        journal,
        log,
        mode_of=policy.mode_of,
        limits=limits,
        started_at=time.time(),
        listeners=_listeners(settings, notifier, log),
    )
    return Loop(
        Window(agent.node, seconds=agent.window_s, interval_s=agent.interval_s, witnesses=witnesses()),
        collectors.build(settings, agent.state_dir),
        judge,
        responder,
        journal,
        log,
        interval_s=agent.interval_s,
        deadline_s=agent.deadline_s,
    )
