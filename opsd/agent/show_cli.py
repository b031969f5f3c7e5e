"""``opsd status`` and ``opsd incidents``: what the agent of a node says, for people and for scripts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opsd import exitcodes
from opsd.config_cli import load
from runbooks.base import Culprit

Command = TypeVar("Command", bound=Callable[..., Any])

_STATES = {"ok": "green", "no_data": "dim", "error": "red", "hung": "red", "starting": "dim"}
_INCIDENTS = {"resolved": "green", "escalated": "bold red"}


def _agent_options(command: Command) -> Command:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the agent's answer as it is."),
        click.option("--config", "file", type=click.Path(path_type=Path), help="Take the address from FILE."),
        click.option("--url", help="Where the agent listens, for instance http://node-17:9477."),
    ):
        command = option(command)
    return command


def _get(url: str | None, file: Path | None, path: str, **query: str | int | Sequence[str]) -> Any:
    import httpx

    base = url or f"http://{load(file).agent.listen}"
    try:
        answer = httpx.get(base.rstrip("/") + path, params=query, timeout=5.0, trust_env=False)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        _fail(f"no agent answers at {base} ({error}); start one with `opsd agent`, or name one with --url")
    if answer.is_error:
        _fail(str(body.get("error", answer.status_code)))
    return body


def _fail(sentence: str) -> NoReturn:
    click.echo(f"opsd: {sentence}", err=True)
    raise click.exceptions.Exit(exitcodes.FAILED)


@click.command()
@_agent_options
def status(url: str | None, file: Path | None, as_json: bool) -> None:
    """What the agent of this node sees right now."""
    answer = _get(url, file, "/api/v1/status")
    if as_json:
        click.echo(json.dumps(answer, indent=1))
        return
    answer, console = _printable(answer), Console(highlight=False)
    age = answer["tick_age_s"]
    said = f"opsd {answer['version']}, mode {answer['mode']}, last tick {age:.1f} s ago"
    console.print(f"[bold]{answer['node']}[/bold]  {said}")
    if not answer["journal"]["up"]:
        console.print(f"[red]journal: {answer['journal']['problem']}[/red]")
    for table in (_collectors(answer), _gpus(answer), _ranks(answer)):
        if table.row_count:
            console.print(table)
    count = sum(answer["incidents"].values())
    console.print(f"{count} incident{'s' * (count != 1)} not over{', see `opsd incidents`' if count else ''}")


class _ListByDefault(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault)
def incidents() -> None:
    """List the incidents of this node (the default), or show one."""


@incidents.command("list")
@_agent_options
@click.option("--state", "states", multiple=True, help="Only this state; current: all that are not over. Repeatable.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most this many.")
def list_incidents(url: str | None, file: Path | None, as_json: bool, states: tuple[str, ...], limit: int) -> None:
    """List incidents, newest first."""
    answer = _get(url, file, "/api/v1/incidents", state=list(states), limit=limit)
    if as_json:
        click.echo(json.dumps(answer, indent=1))
        return
    console = Console(highlight=False)
    if not answer["incidents"]:
        console.print("no incidents")
        return
    for incident in _printable(answer["incidents"]):
        state = f"[{_INCIDENTS.get(incident['state'], 'yellow')}]{incident['state']:<9}[/]"
        opened, severity = _clock(incident["opened_at"]), incident["severity"]
        console.print(f"{opened}  {state}  {severity:<8}  {incident['summary']}", soft_wrap=True)
        console.print(f"    [dim]{_culprit(incident['culprit'])}, {incident['id']}[/dim]", soft_wrap=True)


@incidents.command("show")
@click.argument("id")
@_agent_options
def show_incident(id: str, url: str | None, file: Path | None, as_json: bool) -> None:
    """Everything about the incident ID."""
    answer = _get(url, file, f"/api/v1/incidents/{id}")
    if as_json:
        click.echo(json.dumps(answer, indent=1))
    else:
        Console(highlight=False).print(*_incident_lines(_printable(answer)), sep="\n", soft_wrap=True)


def _incident_lines(incident: Mapping[str, Any]) -> list[str]:
    cost = incident["cost"]
    hours = (cost["gpu_seconds"] or 0.0) / 3600
    lines = [
        incident["id"],
        f"  {incident['summary']}",
        f"  state      {incident['state']}{': ' + incident['verdict'] if incident['verdict'] else ''}",
        f"  severity   {incident['severity']}",
        f"  culprit    {_culprit(incident['culprit'])}, confidence {incident['confidence']:.0%}",
        f"  opened     {_clock(incident['opened_at'])}",
        *([f"  over       {_clock(incident['resolved_at'])}"] if incident["resolved_at"] else []),
        f"  cost       {hours:.2f} GPU-hours{': ' + cost['text'] if cost['text'] else ''}",
        *([f"  job        {incident['job']}"] if incident["job"] else []),
        "  evidence",
        *(f"    {_clock(e['at'])}  {e['text']}  ({e['source']})" for e in incident["evidence"]),
    ]
    if incident["actions"]:
        lines.append("  actions")
        lines += [_action_line(action) for action in incident["actions"]]
    return [*lines, f"  runbook    opsd runbook show {incident['kind']}"]


def _action_line(action: Mapping[str, Any]) -> str:
    detail = f": {action['detail']}" if action["detail"] else ""
    return f"    {_clock(action['at'])}  {action['verb']} {action['target']}  {action['outcome']}{detail}"


def _culprit(culprit: Mapping[str, Any]) -> str:
    return str(Culprit(**culprit))


def _collectors(answer: Mapping[str, Any]) -> Table:
    table = _table("collector", "state", "series", "took", "")
    for c in answer["collectors"]:
        state = f"[{_STATES[c['state']]}]{c['state']}[/]"
        table.add_row(c["name"], state, str(c["series"]), f"{c['duration_s'] * 1e3:.1f} ms", c["reason"])
    return table


def _gpus(answer: Mapping[str, Any]) -> Table:
    table = _table("GPU", "model", "PCI", "")
    for gpu in answer["gpus"]:
        said = "[yellow]simulated[/yellow] " * gpu["simulated"] + (
            f"[red]lost: {gpu['lost']}[/red]" if gpu["lost"] else ""
        )
        table.add_row(str(gpu["index"]), gpu["model"], gpu["pci_bus_id"], said)
    return table


def _ranks(answer: Mapping[str, Any]) -> Table:
    table = _table("rank", "run", "GPU", "phase", "for", "step", "step time", "")
    for rank in answer["ranks"]:
        table.add_row(
            str(rank["rank"]),
            rank["run"],
            "-" if rank["gpu"] is None else str(rank["gpu"]),
            rank["phase"],
            f"{rank['phase_s']:.1f} s",
            "-" if rank["step"] is None else str(rank["step"]),
            "-" if rank["step_s"] is None else f"{rank['step_s']:.3f} s",
            "" if rank["live"] else "[red]not running[/red]",
        )
    return table


def _printable(value: Any) -> Any:
    """``value`` with every text in it fit for the terminal: what users and drivers write has no effect there."""
    if isinstance(value, str):
        return escape("".join(c if c.isprintable() else " " for c in value))
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
