"""``opsd agent``: run the node agent, or show what it would collect."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opsd import config, exitcodes
from opsd.collectors.slurm import SlurmSettings
from opsd.commands.options import config_options, option
from opsd.commands.settings import load
from opsd.config import Settings

if TYPE_CHECKING:
    from opsd.agent.logs import Log
    from opsd.agent.web.access import WebConfig
    from opsd.agent.web.job_nodes import JobNodes

STOP_WITHIN_S = 1.5
"""Seconds after a signal to stop when the process ends by force, even if a driver or a disk hangs."""


@click.command()
@config_options
@option("--once", is_flag=True, help="Print one collection and exit.")
@option("--format", "form", type=click.Choice(["table", "openmetrics"]), default="table", help="Form of --once.")
def agent(file: Path | None, overrides: tuple[str, ...], once: bool, form: str) -> int:
    """Run the node agent: collect, judge, act, serve metrics.

    Ends with 0 after SIGTERM or SIGINT, 1 if its address cannot be listened on, 2 if the configuration is wrong.
    With --once: 1 if a collector failed or hung.
    """
    settings = load(file, overrides)
    if once:
        from opsd.commands.agent_once import show

        return show(settings, form)
    return serve(settings, partial(config.load, file, overrides))


def serve(settings: Settings, read: Callable[[], Settings]) -> int:
    """Run the agent until it is told to stop; SIGHUP makes it ``read`` its settings again. Returns the exit code."""
    wanted = event_on_hangup()
    from opsd.agent import systemd
    from opsd.agent.logs import configure
    from opsd.agent.reload import Reloader
    from opsd.agent.web.app import App
    from opsd.agent.web.history import History
    from opsd.agent.web.hosts import own_hosts
    from opsd.agent.web.server import Server
    from opsd.agent.wiring import build, build_journal

    log = configure()
    stop = stop_on_signals()
    try:
        web, others = web_parts(settings)
    except config.ConfigError as error:
        click.echo(f"opsd: {error}", err=True)
        return exitcodes.USAGE
    try:
        server = Server(settings.agent.listen, log, web, own_hosts(settings.agent.node, settings.agent.names))
    except OSError as error:
        click.echo(
            f"opsd: cannot listen on {settings.agent.listen}: {error.strerror}; another agent may be running, "
            "or set agent.listen to a free address",
            err=True,
        )
        return exitcodes.FAILED
    journal = build_journal(settings, log)
    parts = build(settings, journal, log)
    loop, history = parts.loop, History()
    orders = Orders(log)

    def apply(old: Settings, new: Settings) -> None:
        web, others = web_parts(new)
        parts.reconfigure(old, new)
        server.web, server.hosts = web, own_hosts(settings.agent.node, new.agent.names)
        app.job_nodes = others
        facts["mode"] = new.policy.mode
        orders.take(new)

    reloader = Reloader(settings, read, apply, log, wanted)
    facts = {"node": settings.agent.node, "mode": settings.policy.mode, "started_at": time.time()}
    loop.others += server.samples, reloader.samples
    stale_s = max(5.0, 3 * settings.agent.interval_s)
    app = App(lambda: loop.snapshot, facts, stale_s=stale_s, history=history, job_nodes=others, config=reloader.status)
    server.start(app)
    orders.take(settings)
    log.info("agent started", listen=server.address, **facts)
    systemd.notify("READY=1")

    def after_tick() -> None:
        systemd.notify("WATCHDOG=1")
        history.note(loop.snapshot)
        if reloader.due():
            systemd.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
            reloader.reload()
            systemd.notify("READY=1")

    loop.run(stop, after_tick=after_tick)
    systemd.notify("STOPPING=1")
    server.close()
    journal.close()
    log.info("agent stopped")
    return exitcodes.OK


def web_parts(settings: Settings) -> tuple[WebConfig, JobNodes | None]:
    """Certificate and passwords of the server, and what asks other agents. Raises ConfigError."""
    from opsd.agent.web.access import WebConfig, WebConfigError
    from opsd.agent.web.access import load as load_web
    from opsd.agent.web.job_nodes import PeerError, job_nodes

    try:
        web = load_web(settings.agent.web_config) if settings.agent.web_config else WebConfig()
        return web, job_nodes(settings)
    except (WebConfigError, PeerError) as error:
        raise config.ConfigError(str(error)) from error


class Orders:
    """Executes pending drain orders once Slurm answers again.

    Only an agent that is root or may drain accepts orders, as Slurm would refuse those of any other.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._stop = threading.Event()

    def take(self, settings: Settings) -> None:
        """From now on, by the rules of these settings."""
        from opsd.slurm.connect import choose
        from opsd.slurm.deferred import DeferredUpdates, keep_applying
        from opsd.slurm.ownership import Rules

        self._stop.set()
        self._stop = threading.Event()
        if not settings.section(SlurmSettings).enabled:
            return
        updates = DeferredUpdates(settings.agent.state_dir)
        if os.geteuid() == 0 or settings.policy.drain:
            updates.enable()
        else:
            updates.disable()
        parts = (updates, cache(lambda: choose().slurm), Rules.of(settings.policy), self._say, self._stop)
        threading.Thread(target=keep_applying, args=parts, name="slurm-orders", daemon=True).start()

    def _say(self, sentence: str) -> None:
        self._log.warning("order to Slurm", outcome=sentence)


def event_on_hangup() -> threading.Event:
    """An event that SIGHUP sets."""
    wanted = threading.Event()
    signal.signal(signal.SIGHUP, lambda _number, _frame: wanted.set())
    return wanted


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set. The process ends by force if it still runs ``STOP_WITHIN_S`` later."""
    stop = threading.Event()

    def on_signal(_number: int, _frame: object) -> None:
        if not stop.is_set():
            stop.set()
            force = threading.Timer(STOP_WITHIN_S, os._exit, (exitcodes.OK,))
            force.daemon = True
            force.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop
