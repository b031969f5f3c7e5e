"""``opsd status``: the state of a node's agent, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from opsd.commands.agent_client import Agent, agent_options
from opsd.commands.output import plain_table, printable, rank_table

_STATES = {"ok": "green", "limited": "yellow", "no_data": "dim", "error": "red", "hung": "red", "starting": "dim"}


@click.command()
@agent_options
def status(agent: Agent, as_json: bool) -> None:
    """Show what the agent of this node currently sees."""
    answer = agent.ask("/api/v1/status")
    if as_json:
        click.echo(json.dumps(answer, indent=1))
        return
    answer, console = printable(answer), Console(highlight=False)
    age = answer["tick_age_s"]
    said = f"opsd {answer['version']}, mode {answer['mode']}, last tick {age:.1f} s ago"
    console.print(f"[bold]{answer['node']}[/bold]  {said}")
    if not answer["journal"]["up"]:
        console.print(f"[red]journal: {answer['journal']['problem']}[/red]")
    for table in (_collectors(answer), _gpus(answer), rank_table(answer["ranks"])):
        if table.row_count:
            console.print(table)
    count = sum(answer["incidents"].values())
    console.print(f"{count} incident{'s' * (count != 1)} not over{', see `opsd incidents`' if count else ''}")


def _collectors(answer: Mapping[str, Any]) -> Table:
    table = plain_table("collector", "state", "series", "took", "")
    for c in answer["collectors"]:
        state = f"[{_STATES[c['state']]}]{c['state']}[/]"
        table.add_row(c["name"], state, str(c["series"]), f"{c['duration_s'] * 1e3:.1f} ms", c["reason"])
    return table


def _gpus(answer: Mapping[str, Any]) -> Table:
    table = plain_table("GPU", "model", "PCI", "")
    for gpu in answer["gpus"]:
        said = "[yellow]simulated[/yellow] " * gpu["simulated"] + (
            f"[red]lost: {gpu['lost']}[/red]" if gpu["lost"] else ""
        )
        table.add_row(str(gpu["index"]), gpu["model"], gpu["pci_bus_id"], said)
    return table
