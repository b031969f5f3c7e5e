"""``opsd agent``: run the node agent, or show what it would collect."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from opsd import config, exitcodes
from opsd.commands.options import config_options, exit_codes, option
from opsd.commands.settings import load
from opsd.config import Settings

STOP_WITHIN_S = 1.5
"""Seconds after a signal to stop when the process ends by force, even if a driver or a disk hangs."""


@click.command(
    epilog=exit_codes(
        {
            0: "stopped by SIGTERM or SIGINT",
            1: "another agent has its address or its journal; with --once, a collector failed or hung",
            2: "the configuration is wrong",
        }
    )
)
@config_options
@option("--once", is_flag=True, help="Print one collection and exit.")
@option(
    "--format", "form", type=click.Choice(["table", "json", "openmetrics"]), default="table", help="Form of --once."
)
def agent(file: Path | None, overrides: tuple[str, ...], once: bool, form: str) -> int:
    """Run the node agent: collect, judge, act, serve metrics."""
    settings = load(file, overrides)
    if once:
        from opsd.commands.agent_once import show

        return show(settings, form)
    return serve(settings, partial(config.load, file, overrides))


def serve(settings: Settings, read: Callable[[], Settings]) -> int:
    """Run the agent until a signal stops it; SIGHUP makes it ``read`` its settings again. Returns the exit code."""
    stop, reload = listen_to_signals()
    from opsd.agent import heap
    from opsd.agent.daemon import Daemon, ListenError
    from opsd.agent.logs import configure
    from opsd.agent.store import InUseError

    heap.settle()
    try:
        daemon = Daemon(settings, configure(), read, reload)
    except config.ConfigError as error:
        click.echo(f"opsd: {error}", err=True)
        return exitcodes.USAGE
    except ListenError as error:
        click.echo(
            f"opsd: cannot listen on {settings.agent.listen}: {error}; another agent may be running, "
            "or set agent.listen to a free address",
            err=True,
        )
        return exitcodes.FAILED
    except InUseError as error:
        click.echo(f"opsd: {error}", err=True)
        return exitcodes.FAILED
    daemon.run(stop)
    return exitcodes.OK


def listen_to_signals() -> tuple[threading.Event, threading.Event]:
    """An event that SIGTERM and SIGINT set, and one that SIGHUP sets.

    The process ends by force if it still runs ``STOP_WITHIN_S`` after the first. A thread sets the events: a handler
    runs in the middle of whatever the main thread does, and would wait for ever for the lock of an event that the main
    thread, or a handler that it has interrupted, holds.
    """
    stop, reload = threading.Event(), threading.Event()
    received, send = os.pipe()
    os.set_blocking(send, False)
    signal.set_wakeup_fd(send, warn_on_full_buffer=False)

    def dispatch() -> None:
        while True:
            for number in os.read(received, 4096):
                if number == signal.SIGHUP:
                    reload.set()
                elif not stop.is_set():
                    stop.set()
                    force = threading.Timer(STOP_WITHIN_S, os._exit, (exitcodes.OK,))
                    force.daemon = True
                    force.start()

    threading.Thread(target=dispatch, name="signals", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    return stop, reload
