"""``opsd metrics``: the catalogue of everything that the agent exports."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
from rich.console import RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from opsd.agent import collectors
from opsd.agent import metrics as own
from opsd.collectors import plugins
from opsd.collectors.base import Metric
from opsd.commands.options import option
from opsd.commands.output import output_console, plain_table
from opsd.config import Settings


def catalogue() -> list[tuple[str, Metric]]:
    """(source, metric) of every metric, those of the agent itself first; collectors may share one."""
    sources: dict[Metric, list[str]] = {metric: ["agent"] for metric in own.METRICS}
    for collector in collectors.build(Settings()):
        for metric in collector.metrics:
            sources.setdefault(metric, []).append(collector.name)
    return [(", ".join(names), metric) for metric, names in sources.items()]


def label_values() -> dict[str, str]:
    """The values of each label, for all metrics that use it."""
    found: dict[str, list[str]] = {}
    for labels in (own.LABELS, *(plugin.labels for plugin in plugins())):
        for label, values in labels.items():
            found.setdefault(label, []).append(values)
    return {label: "; ".join(dict.fromkeys(found[label])) for label in sorted(found)}


@click.command()
@option("--list", "_list", is_flag=True, help="List every metric (the default).")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def metrics(_list: bool, as_json: bool) -> None:
    """List every metric that the agent exports: name, type, labels, unit, help and source; then what labels hold."""
    if as_json:
        rows = [
            {"name": m.name, "type": m.kind, "labels": m.labels, "unit": m.unit, "help": m.help, "source": source}
            for source, m in catalogue()
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    console = output_console()
    if console.is_terminal:
        for line in _blocks():
            console.print(line)
    else:
        console.print(*_tables(), sep="\n")


def _blocks() -> Iterator[RenderableType]:
    """For a terminal of any width: each metric with its help below it, each label with its values."""
    for source, metric in catalogue():
        labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
        facts = ", ".join(filter(None, (metric.kind, metric.unit, f"from {source}")))
        yield Text.assemble((metric.name, "bold"), labels, f"  {facts}", overflow="fold")
        yield Padding(Text(metric.help, overflow="fold"), (0, 0, 0, 4))
    yield Text("\nlabels", style="bold")
    for label, values in label_values().items():
        yield Text(label, style="bold", overflow="fold")
        yield Padding(Text(values, overflow="fold"), (0, 0, 0, 4))


def _tables() -> tuple[Table, str, Table]:
    """For a file or a pipe: a metric a line, then a label a line."""
    table = plain_table("name", "type", "labels", "unit", "help", "source")
    for source, metric in catalogue():
        table.add_row(metric.name, metric.kind, ", ".join(metric.labels), metric.unit, escape(metric.help), source)
    labels = plain_table("label", "values")
    for label, values in label_values().items():
        labels.add_row(label, escape(values))
    return table, "", labels
