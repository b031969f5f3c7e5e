"""``opsd status``: the state of a node's agent, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from rich.table import Table

from opsd.agent.web.api import RepairNow, cost_text
from opsd.commands.agent_client import Agent, agent_options
from opsd.commands.gpu_state import gpu_state, heat_style
from opsd.commands.output import output_console, plain_table, printable, rank_table
from opsd.words import plural, span

_TONES = {"critical": "bold red", "warning": "yellow", "info": "dim"}
_STATES = {"ok": "green", "limited": "yellow", "no_data": "dim", "error": "red", "hung": "red", "starting": "dim"}
WIDE = 120
"""Columns from which a GPU's model and address have room in its line."""


@click.command()
@agent_options
def status(agent: Agent, as_json: bool) -> None:
    """Show what the agent of this node currently sees."""
    answer = agent.ask("/api/v1/status")
    if as_json:
        click.echo(json.dumps(answer, indent=1))
        return
    found = agent.ask("/api/v1/incidents", state="current")["incidents"]
    answer, console = printable(answer), output_console()
    age = answer["tick_age_s"]
    said = f"opsd {answer['version']}, mode {answer['mode']}, last tick {age:.1f} s ago"
    console.print(f"[bold]{answer['node']}[/bold]  {said}")
    found = printable(found)
    for line in first_lines(answer, found):
        console.print(line, soft_wrap=True)
    for table in (_gpus(answer, found, console.width), _jobs(answer), rank_table(answer["ranks"]), _collectors(answer)):
        if table.row_count:
            console.print(table)
    working = sum(c["state"] == "ok" for c in answer["collectors"])
    console.print(f"{plural(working, 'collector')} ok")


def first_lines(answer: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """In rich's markup: whether the agent can remember, the open incidents, and what is being done with the node."""
    if not answer["journal"]["up"]:
        yield f"[red]journal: {answer['journal']['problem']}[/red]"
    yield from problems(found)
    yield from under_way(answer)


def problems(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The open incidents in rich's markup, the gravest first: what, its cost, who acts, the next command."""
    if not found:
        yield "[green]no open incidents[/green]"
    for i in sorted(found, key=lambda i: [*_TONES].index(i["severity"])):
        yield f"[{_TONES[i['severity']]}]{i['severity']}[/] {i['summary']}  [dim]{i['id']}[/dim]"
        if told := i.get("brief"):
            yield f"  costs now  {told['cost']}"
            yield f"  who acts   {told['acts']}"
            if owner := told.get("owner"):
                yield f"  who has it {owner}"
            yield f"  next       [bold]{told['command']}[/bold]  (on {told['on']})"


def under_way(answer: Mapping[str, Any]) -> Iterator[str]:
    """In rich's markup what is being done with the node; an agent of an earlier release says less."""
    if repair := answer.get("repair"):
        yield f"[yellow]repair: {RepairNow(**repair).text}[/yellow]"
    if answer.get("lemon"):
        yield f"[yellow]lemon: {plural(int(answer['faults']), 'fault')} in 30 days[/yellow], see `opsd nodes lemons`"


def _collectors(answer: Mapping[str, Any]) -> Table:
    """Those that do not work; the others are counted."""
    table = plain_table("collector", "state", "series", "took", "")
    for c in answer["collectors"]:
        if c["state"] == "ok" and not c["reason"]:
            continue
        state = f"[{_STATES[c['state']]}]{c['state']}[/]"
        table.add_row(c["name"], state, str(c["series"]), f"{c['duration_s'] * 1e3:.1f} ms", c["reason"])
    return table


def _gpus(answer: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]], width: int) -> Table:
    """A line for each GPU; a narrow terminal has no model and no address."""
    wide = width >= WIDE
    table = plain_table("GPU", "temp", "use", "state", *(("model", "PCI") if wide else ()), "")
    table.columns[3].no_wrap, table.columns[3].overflow = True, "ellipsis"
    for gpu in answer["gpus"]:
        said, style = gpu_state(gpu, incidents, answer["ranks"], answer.get("jobs", ()))
        celsius, used = gpu["temperature_celsius"], gpu["utilization_percent"]
        table.add_row(
            str(gpu["index"]),
            "-" if celsius is None else f"[{heat_style(gpu)}]{celsius:.0f} °C[/]",
            "-" if used is None else f"{used:.0f}%",
            f"[{style}]{said}[/]",
            *((gpu["model"], gpu["pci_bus_id"]) if wide else ()),
            "[yellow]simulated[/yellow]" * gpu["simulated"],
        )
    return table


def _jobs(answer: Mapping[str, Any]) -> Table:
    """Slurm's jobs on the GPUs; an agent of an earlier release names none."""
    table = plain_table("job", "user", "GPUs", "idle GPUs", "idle for", "idle cost")
    for job in answer.get("jobs", ()):
        gpus, idle = ", ".join(map(str, job["gpus"])), job["idle_s"]
        said = ("-", "", "") if not idle else _idle_text(idle, answer)
        table.add_row(job["job"], job["user"] or "-", gpus, *said)
    return table


def _idle_text(idle_s: Mapping[str, float], answer: Mapping[str, Any]) -> tuple[str, str, str]:
    hours = sum(idle_s.values()) / 3600
    return f"[yellow]{', '.join(idle_s)}[/yellow]", span(max(idle_s.values())), cost_text(hours, answer)
