"""``opsd status``: the state of a node's agent, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from rich.table import Table

from opsd.agent.web.jobs import cost_text
from opsd.agent.web.parts import span
from opsd.agent.web.repairs import RepairNow
from opsd.commands.agent_client import Agent, agent_options
from opsd.commands.gpu_state import gpu_state, heat_style
from opsd.commands.output import output_console, plain_table, printable, rank_table
from opsd.words import plural

_STATES = {"ok": "green", "limited": "yellow", "no_data": "dim", "error": "red", "hung": "red", "starting": "dim"}


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
    for note in notes(answer):
        console.print(note)
    for table in (_collectors(answer), _gpus(answer, printable(found)), _jobs(answer), rank_table(answer["ranks"])):
        if table.row_count:
            console.print(table)
    count = sum(answer["incidents"].values())
    console.print(f"{plural(count, 'open incident')}, see `opsd incidents`" if count else "no open incidents")


def notes(answer: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say of the node, in rich's markup; an agent of an earlier release says less."""
    if not answer["journal"]["up"]:
        yield f"[red]journal: {answer['journal']['problem']}[/red]"
    if repair := answer.get("repair"):
        yield f"[yellow]repair: {RepairNow(**repair).text}[/yellow]"
    if answer.get("lemon"):
        yield f"[yellow]lemon: {plural(int(answer['faults']), 'fault')} in 30 days[/yellow], see `opsd nodes lemons`"


def _collectors(answer: Mapping[str, Any]) -> Table:
    table = plain_table("collector", "state", "series", "took", "")
    for c in answer["collectors"]:
        state = f"[{_STATES[c['state']]}]{c['state']}[/]"
        table.add_row(c["name"], state, str(c["series"]), f"{c['duration_s'] * 1e3:.1f} ms", c["reason"])
    return table


def _gpus(answer: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]]) -> Table:
    table = plain_table("GPU", "state", "temp", "use", "model", "PCI", "")
    for gpu in answer["gpus"]:
        said, style = gpu_state(gpu, incidents, answer["ranks"], answer.get("jobs", ()))
        celsius, used = gpu["temperature_celsius"], gpu["utilization_percent"]
        table.add_row(
            str(gpu["index"]),
            f"[{style}]{said}[/]",
            "-" if celsius is None else f"[{heat_style(gpu)}]{celsius:.0f} °C[/]",
            "-" if used is None else f"{used:.0f}%",
            gpu["model"],
            gpu["pci_bus_id"],
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
