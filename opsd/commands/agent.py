"""``opsd agent``: run the node agent, or show what it would collect."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opsd import exitcodes
from opsd.collectors.slurm import SlurmSettings
from opsd.commands.options import config_options, option
from opsd.commands.settings import load
from opsd.config import Settings

if TYPE_CHECKING:
    from opsd.agent.logs import Log

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
    return serve(settings)


def serve(settings: Settings) -> int:
    """Run the agent until it is told to stop; returns the exit code."""
    from opsd.agent import systemd
    from opsd.agent.logs import configure
    from opsd.agent.web.access import WebConfig, WebConfigError
    from opsd.agent.web.access import load as load_web
    from opsd.agent.web.app import App
    from opsd.agent.web.history import History
    from opsd.agent.web.hosts import own_hosts
    from opsd.agent.web.job_nodes import PeerError, job_nodes
    from opsd.agent.web.server import Server
    from opsd.agent.wiring import build_journal, build_loop

    log = configure()
    stop = stop_on_signals()
    try:
        web = load_web(settings.agent.web_config) if settings.agent.web_config else WebConfig()
        others = job_nodes(settings)
    except (WebConfigError, PeerError) as error:
        click.echo(f"opsd: {error}", err=True)
        return exitcodes.USAGE
    try:
        hosts = own_hosts(settings.agent.node, settings.agent.names)
        server = Server(settings.agent.listen, log, web, hosts)
    except OSError as error:
        click.echo(
            f"opsd: cannot listen on {settings.agent.listen}: {error.strerror}; another agent may be running, "
            "or set agent.listen to a free address",
            err=True,
        )
        return exitcodes.FAILED
    journal = build_journal(settings, log)
    loop = build_loop(settings, journal, log)
    loop.others.append(server.samples)
    facts = {"node": settings.agent.node, "mode": settings.policy.mode, "started_at": time.time()}
    history = History()
    stale_s = max(5.0, 3 * settings.agent.interval_s)
    server.start(App(lambda: loop.snapshot, facts, stale_s=stale_s, history=history, job_nodes=others))
    if settings.section(SlurmSettings).enabled:
        carry_out_orders(settings, log, stop)
    log.info("agent started", listen=server.address, **facts)
    systemd.notify("READY=1")

    def after_tick() -> None:
        systemd.notify("WATCHDOG=1")
        history.note(loop.snapshot)

    loop.run(stop, after_tick=after_tick)
    systemd.notify("STOPPING=1")
    server.close()
    journal.close()
    log.info("agent stopped")
    return exitcodes.OK


def carry_out_orders(settings: Settings, log: Log, stop: threading.Event) -> None:
    """Execute pending drain orders once Slurm answers again.

    Only an agent that is root or may drain accepts orders, as Slurm would refuse those of any other.
    """
    from opsd.slurm.connect import choose
    from opsd.slurm.deferred import DeferredUpdates, keep_applying
    from opsd.slurm.ownership import Rules

    def say(sentence: str) -> None:
        log.warning("order to Slurm", outcome=sentence)

    updates = DeferredUpdates(settings.agent.state_dir)
    if os.geteuid() == 0 or settings.policy.drain:
        updates.enable()
    else:
        updates.disable()
    parts = (updates, cache(lambda: choose().slurm), Rules.of(settings.policy), say, stop)
    threading.Thread(target=keep_applying, args=parts, name="slurm-orders", daemon=True).start()


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
