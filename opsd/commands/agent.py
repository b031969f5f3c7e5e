"""``opsd agent``: run the node agent, or show what it would collect."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from opsd import config, exitcodes
from opsd.agent import collectors
from opsd.agent.gather import Gatherer, Health, Source
from opsd.agent.metrics import collector_samples
from opsd.agent.web.exposition import Exposition
from opsd.commands.options import config_options, exit_codes, load, option
from opsd.commands.output import output_console
from opsd.config import Settings

_STYLES = {
    Health.OK: "green", Health.LIMITED: "yellow", Health.NO_DATA: "dim", Health.ERROR: "red", Health.HUNG: "red",
    Health.STARTING: "dim",
}  # fmt: skip


def show(settings: Settings, form: str) -> int:
    """Collect once and print it as ``form``, "table", "json" or "openmetrics"; returns the exit code."""
    gatherer = Gatherer(collectors.build(settings), deadline_s=settings.agent.deadline_s, clock=time.monotonic)
    sources = gatherer.gather(settings.agent.deadline_s)
    for source in sources:
        if source.health is Health.STARTING:
            source.health, source.reason = Health.HUNG, f"has not returned within {settings.agent.deadline_s:g} s"
    if form == "openmetrics":
        own = list(collector_samples(sources, time.time() - time.monotonic()))
        body, _ = Exposition(lambda: [own, *(s.reading.samples for s in sources)]).render(
            "application/openmetrics-text"
        )
        click.echo(body, nl=False)
    elif form == "json":
        click.echo(json.dumps([_as_dict(source) for source in sources], indent=1))
    else:
        _print(sources)
    failed = any(source.health in (Health.ERROR, Health.HUNG) for source in sources)
    return exitcodes.FAILED if failed else exitcodes.OK


def _as_dict(source: Source) -> dict[str, Any]:
    series = [
        {
            "name": metric.name,
            "labels": dict(zip(metric.labels, labels, strict=True)),
            "value": value if math.isfinite(value) else None,
        }
        for metric, value, labels in source.reading.samples
    ]
    return {
        "collector": source.name,
        "state": source.health.value,
        "reason": source.reason,
        "seconds": source.duration_s,
        "series": series,
    }


def _print(sources: tuple[Source, ...]) -> None:
    console = output_console()
    for source in sources:
        took = f"{len(source.reading.samples)} series in {source.duration_s * 1e3:.1f} ms"
        said = escape(source.reason) or took
        console.print(
            f"[bold]{source.name}[/bold] [{_STYLES[source.health]}]{source.health.value}[/]", said, highlight=False
        )
        if source.reading.samples:
            console.print(_table(source))


def _table(source: Source) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("series", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for metric, value, labels in source.reading.samples:
        pairs = ", ".join(f"{name}={text}" for name, text in zip(metric.labels, labels, strict=True) if text)
        table.add_row(escape(f"{metric.name} {pairs}"), f"{value:.10g} {metric.unit}".strip())
    return table


STOP_WITHIN_S = 1.5
"""Seconds after a signal to stop when the process ends by force, even if a driver or a disk hangs."""


@click.command(
    epilog=exit_codes(
        {
            0: "stopped by SIGTERM or SIGINT",
            1: "cannot listen on its address; with --once, a collector failed or hung",
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
        return show(settings, form)
    return serve(settings, partial(config.load, file, overrides))


def serve(settings: Settings, read: Callable[[], Settings]) -> int:
    """Run the agent until a signal stops it; SIGHUP makes it ``read`` its settings again. Returns the exit code."""
    stop, reload = listen_to_signals()
    from opsd.agent import heap
    from opsd.agent.daemon import Daemon, ListenError
    from opsd.agent.logs import configure

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
