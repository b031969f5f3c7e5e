"""Build the agent from its settings."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache, partial

from opsd.agent import collectors, systemd
from opsd.agent.actions import Drainer, Executor, Notifier
from opsd.agent.annotate import Annotator
from opsd.agent.incident_manager import IncidentManager, Listener
from opsd.agent.journal import Journal
from opsd.agent.judge import Judge
from opsd.agent.kept_window import KeptWindowError, SavedWindow, newest
from opsd.agent.logs import Log
from opsd.agent.loop import Loop
from opsd.agent.notify import Announcer, LogNotifier, WebhookNotifier
from opsd.agent.policy import ActionLimits
from opsd.agent.window import Window
from opsd.collectors import plugins, witnesses
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


def _comment_job(node: str, job: int, text: str) -> None:
    """Tell the owner of a job that its GPUs of ``node`` are idle, through this machine's Slurm."""
    choose().slurm.summarize(job, text, f"idle {node}")


def _drainer(settings: Settings) -> Drainer:
    """Drains this node through this machine's Slurm, which is looked up on use, and orders its repair if it may."""
    slurm = cache(lambda: choose().slurm)
    updates = DeferredUpdates(settings.agent.state_dir)
    drain = SlurmDrainer(slurm, settings.agent.node, Rules.of(settings.policy), updates)
    if settings.policy.repair == "observe":
        return drain
    from opsd.repair.order import Ordering  # most agents order nothing

    return Ordering(drain, settings.agent.state_dir, acting=settings.policy.repair == "act")


def _listeners(settings: Settings, notifier: Notifier, log: Log) -> list[Listener]:
    """The listeners of every change of an incident: notifications and Grafana."""
    told: list[Listener] = []
    notify, node = settings.notify, settings.agent.node
    if notify.receiver:
        told.append(
            Announcer(
                notifier, node, log, muted=ActionLimits.of(settings.policy).muted, mode_of=settings.policy.mode_of
            )
        )
    if notify.grafana_url:
        told.append(Annotator(notify.grafana_url, notify.grafana_token_file, node, log))
    return told


def _executor(settings: Settings, journal: Journal, notifier: Notifier) -> Executor:
    nvml = settings.section(NvmlSettings)
    return Executor(
        shm=settings.section(RanksSettings).root,
        notify=notifier,
        set_power_limit=PowerControl(nvml.library).set_power_limit if nvml.enabled else None,
        drain_node=_drainer(settings) if settings.policy.drain else None,
        comment_job=partial(_comment_job, settings.agent.node),
    )


def _judge(settings: Settings, log: Log) -> Judge:
    return Judge(RUNBOOKS, log, hold_s=settings.policy.reopen_within_s, max_relapses=settings.policy.max_relapses)


def _notifier(settings: Settings, log: Log) -> Notifier:
    receiver = settings.notify.receiver
    return WebhookNotifier(log, receiver) if receiver else LogNotifier(log)


@dataclass(frozen=True, slots=True)
class Parts:
    """What of the agent a reload of the configuration reaches."""

    loop: Loop
    incident_manager: IncidentManager
    journal: Journal
    log: Log

    def reconfigure(self, old: Settings, new: Settings) -> None:
        """Go on with ``new`` settings instead of the ``old`` ones, but for ``[agent]``. For the loop's thread.

        Collectors are made again only if one of their sections has changed, so that no history is lost otherwise.
        """
        names = [plugin.name for plugin in plugins()]
        changed = any(getattr(old, name) != getattr(new, name) for name in names)
        made = collectors.build(new, new.agent.state_dir) if changed else None
        judge, notifier = _judge(new, self.log), _notifier(new, self.log)
        executor, listeners = _executor(new, self.journal, notifier), _listeners(new, notifier, self.log)
        if made is not None:
            self.loop.replace_collectors(made)
        self.loop.replace_judge(judge)
        mode_of, limits = new.policy.mode_of, ActionLimits.of(new.policy)
        for former in self.incident_manager.replace_policy(judge, executor, mode_of, limits, listeners):
            if isinstance(former, Announcer | Annotator):
                former.close()


def build(settings: Settings, journal: Journal, log: Log) -> Parts:
    """The loop with everything connected, before the first collection."""
    agent, policy = settings.agent, settings.policy
    notifier, judge = _notifier(settings, log), _judge(settings, log)
    incident_manager = IncidentManager(
        judge,
        _executor(settings, journal, notifier),
        journal,
        log,
        mode_of=policy.mode_of,
        limits=ActionLimits.of(policy),
        started_at=time.time(),
        listeners=_listeners(settings, notifier, log),
    )
    window = Window(agent.node, seconds=agent.window_s, interval_s=agent.interval_s, witnesses=witnesses())
    saved = SavedWindow(systemd.runtime_folder())
    try:
        if past := newest((incident_manager.kept_window, saved.read()), window.ticks, time.monotonic()):
            window.go_on(past)
    except KeptWindowError as error:
        log.warning("window begins empty", reason=str(error))
    incident_manager.kept_window = b""
    loop = Loop(
        window,
        collectors.build(settings, agent.state_dir),
        judge,
        incident_manager,
        journal,
        log,
        interval_s=agent.interval_s,
        deadline_s=agent.deadline_s,
        saved=saved,
    )
    return Parts(loop, incident_manager, journal, log)
