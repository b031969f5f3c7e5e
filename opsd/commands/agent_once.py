"""``opsd agent --once``: one collection, printed."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from opsd import exitcodes
from opsd.agent import collectors
from opsd.agent.gather import Gatherer, Health, Source
from opsd.agent.metrics import collector_samples
from opsd.agent.web.exposition import Exposition
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
