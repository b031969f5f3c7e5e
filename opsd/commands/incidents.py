"""``opsd incidents``: the incidents and repairs of a node, as text or JSON."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from opsd.agent.lifecycle import PATIENCE_S, SOCKET, WRITE_S
from opsd.agent.web.api import outcome
from opsd.commands.agent_client import Agent, agent_options
from opsd.commands.options import Group, Span, exit_codes, option
from opsd.commands.output import fail, output_console, plain_table, printable
from opsd.commands.settings import load
from opsd.control import ControlError, ask
from opsd.runbooks.base import Culprit, State
from opsd.words import clock

_STATES = {
    "resolved": "green", "unproven": "yellow", "escalated": "bold red", "returned": "green", "rma": "bold red",
    "left": "bold red",
}  # fmt: skip
_REPAIR = "repair-"
"""Begins the ids of repairs."""


def _this_user() -> str:
    """The person behind sudo, else this user."""
    if name := os.environ.get("SUDO_USER"):
        return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


class _ListByDefault(Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault)
def incidents() -> None:
    """List the incidents and repairs of this node (the default), show one, acknowledge or close it, or show statistics.

    An acknowledged incident pages nobody else.
    """


@incidents.command("list")
@agent_options
@option(
    "--state",
    "states",
    type=click.Choice(["current", *(state.value for state in State)]),
    multiple=True,
    help="Only this state; current: all that are not over. Repeatable.",
)
@option("--limit", type=click.IntRange(1, 1000), default=20, help="At most this many.")
def list_incidents(agent: Agent, as_json: bool, states: tuple[str, ...], limit: int) -> None:
    """List incidents, and the repairs of the node with what each has done, newest first."""
    answer = agent.ask("/api/v1/incidents", state=list(states), limit=limit)
    answer |= agent.find("/api/v1/repairs", state=list(states), limit=limit) or {"repairs": []}
    if as_json:
        click.echo(json.dumps(answer, indent=1))
        return
    console = output_console()
    records = printable([*answer["incidents"], *answer["repairs"]])
    if not records:
        console.print("no incidents")
        return
    between = "\n    " if console.is_terminal else "  "  # in a pipe a record is a line
    for record in sorted(records, key=lambda record: record["opened_at"], reverse=True)[:limit]:
        line, *more = _repair_record(record) if "steps" in record else _incident_record(record)
        console.print(line, *(f"[dim]{text}[/dim]" for text in more), sep=between, soft_wrap=True)


def _incident_record(incident: Mapping[str, Any]) -> list[str]:
    more = [f"{_culprit(incident['culprit'])}, {incident['id']}"]
    if (ack := incident.get("ack")) and ack["over_at"] is None and incident["resolved_at"] is None:
        more.append(f"{ack['by']} has it since {clock(ack['at'])}")
    more += [f"symptom: {symptom['summary']}, {symptom['id']}" for symptom in incident["symptoms"]]
    return [_record(incident, incident["severity"], incident["summary"]), *more]


def _repair_record(repair: Mapping[str, Any]) -> list[str]:
    verdict = f": {repair['verdict']}" if repair["verdict"] else ""
    steps = (f"{step['what']} {outcome(step['ok'])}" for step in repair["steps"])
    return [_record(repair, "repair", f"{repair['reason']}"), *steps, f"{repair['state']}{verdict}, {repair['id']}"]


def _record(record: Mapping[str, Any], sort: str, text: str) -> str:
    state = f"[{_STATES.get(record['state'], 'yellow')}]{record['state']:<9}[/]"
    return f"{clock(record['opened_at'])}  {state}  {sort:<8}  {text}"


@incidents.command("show")
@click.argument("id")
@agent_options
def show_incident(id: str, agent: Agent, as_json: bool) -> None:
    """Everything about the incident or repair ID."""
    sort, lines = ("repairs", _repair_lines) if id.startswith(_REPAIR) else ("incidents", _incident_lines)
    path = f"/api/v1/{sort}/{quote(id, safe='', errors='replace')}"
    answer = agent.find(path) if id.strip(".") else None  # dots are a folder in a URL
    if answer is None:
        fail(f"the agent knows no incident or repair {id!r}: `opsd incidents --limit 1000` lists all that it knows")
    if as_json:
        click.echo(json.dumps(answer, indent=1))
    else:
        output_console().print(*lines(printable(answer)), sep="\n", soft_wrap=True)


@incidents.command(
    "ack",
    epilog=exit_codes(
        {
            0: "done",
            1: "the agent refuses or does not answer",
            2: "the command line is wrong",
        }
    ),
)
@click.argument("id")
@option("--by", default=_this_user, metavar="NAME", help="Who has it. Default: the user who calls.")
@option("--for", "for_s", type=Span(), help="How long, such as 30m, 4h or 2d. Default: until it is over.")
@option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Take the state folder from FILE.")
def acknowledge(id: str, by: str, for_s: float | None, file: Path | None) -> None:
    """Acknowledge the incident ID: NAME has it, and nobody else is paged.

    opsd still notifies of its end, and if it becomes worse. After the time of --for it notifies again, unless the
    incident is over. The runbook goes on as before. For root and the agent's user, on the node itself.
    """
    _order({"cmd": "ack", "incident": id, "by": by, "for_s": for_s}, file)


@incidents.command(
    "close",
    epilog=exit_codes(
        {
            0: "done",
            1: "the agent refuses or does not answer",
            2: "the command line is wrong",
        }
    ),
)
@click.argument("id")
@option("--reason", required=True, metavar="TEXT", help="Why it is over; it stays in the journal.")
@option("--by", default=_this_user, metavar="NAME", help="Who says so. Default: the user who calls.")
@option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Take the state folder from FILE.")
def close_incident(id: str, reason: str, by: str, file: Path | None) -> None:
    """Close the incident ID, because a person knows what the machine cannot: that it is over, or is none.

    The same evidence opens it no more. A later event, graver evidence, or the fault after it was gone, opens a new
    one. For root and the agent's user, on the node itself.
    """
    _order({"cmd": "close", "incident": id, "by": by, "reason": reason}, file)


def _order(request: Mapping[str, object], file: Path | None) -> None:
    """Have the agent of this node do it, and say what it has done."""
    path = load(file).agent.state_dir / SOCKET
    try:
        answer = ask(path, request, PATIENCE_S + 2 * WRITE_S, "the agent")
    except ControlError as error:
        denied = isinstance(error.__cause__, PermissionError)
        advice = "only root and the agent's user may: try it with sudo" if denied else "does an agent run on this node?"
        fail(f"{error}; {advice}")
    if not answer.get("ok"):
        fail(str(answer.get("error", "the agent refuses without a reason")))
    click.echo(printable(str(answer.get("said", ""))))


@incidents.command()
@agent_options
def stats(agent: Agent, as_json: bool) -> None:
    """Statistics of incidents by kind.

    Detection is from the oldest evidence to the opening, resolution from there to the end; both are medians. Healed
    incidents ended by themselves, repaired ones after an action of opsd.
    """
    answer = agent.ask("/api/v1/statistics")
    if as_json:
        click.echo(json.dumps(answer, indent=1))
        return
    console = output_console()
    if not answer["kinds"]:
        console.print("no incidents")
        return
    table = plain_table("kind", "count", "detected", "resolved", "healed", "repaired", "escalated")
    for r in printable(answer["kinds"]):
        shares = (f"{r[name]:.0%}" for name in ("by_itself", "by_action", "escalated"))
        table.add_row(r["kind"], str(r["count"]), _seconds(r["detect_s"]), _seconds(r["resolve_s"]), *shares)
    console.print(table)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _incident_lines(incident: Mapping[str, Any]) -> list[str]:
    over = incident["resolved_at"]
    relapses = incident["relapses"]
    lines = [
        *_brief_lines(incident.get("brief")),
        incident["id"],
        f"  {incident['summary']}",
        f"  state      {incident['state']}{': ' + incident['verdict'] if incident['verdict'] else ''}",
        f"  severity   {incident['severity']}",
        f"  culprit    {_culprit(incident['culprit'])}, confidence {incident['confidence']:.0%}",
        f"  opened     {clock(incident['opened_at'])}",
        *([f"  over       {clock(over)}"] if over else []),
        *([f"  came back  {relapses} time{'s' * (relapses != 1)}"] if relapses else []),
        *([f"  job        {incident['job']}"] if incident["job"] else []),
        *([f"  cause      {incident['cause']}"] if incident["cause"] else []),
        "  evidence",
        *(f"    {clock(e.get('last') or e['at'])}  {e['text']}  ({e['source']})" for e in incident["evidence"]),
    ]
    if incident["actions"]:
        lines.append("  actions")
        lines += [_action_line(action) for action in incident["actions"]]
    for name, line in (("symptoms", _symptom_line), ("similar", _similar_line)):
        lines += [f"  {name}", *map(line, incident[name])] if incident[name] else []
    return [*lines, f"  runbook    opsd runbook show {incident['kind']}"]


def _brief_lines(told: Mapping[str, str] | None) -> list[str]:
    """What the person on call needs first; an agent of an earlier release tells none."""
    if told is None:
        return []
    return [
        f"[bold]{told['happened']}[/bold]",
        f"  costs now  {told['cost']}",
        f"  who acts   {told['acts']}",
        *([f"  who has it {told['owner']}"] if told.get("owner") else []),
        f"  next       [bold]{told['command']}[/bold]  (on {told['on']})",
        "",
    ]


def _repair_lines(repair: Mapping[str, Any]) -> list[str]:
    verdict = f": {repair['verdict']}" if repair["verdict"] else ""
    return [
        repair["id"],
        f"  repair of {repair['node']}, begun by {'a person' if repair['by_hand'] else 'the policy'}",
        f"  state      {repair['state']}{verdict}",
        f"  drained    {repair['reason']}",
        f"  opened     {clock(repair['opened_at'])}",
        *([f"  over       {clock(repair['ended_at'])}"] if repair["ended_at"] else []),
        *([f"  paused     {repair['paused']}"] if repair["paused"] and not repair["end"] else []),
        *([f"  evidence   {repair['bundle']}"] if repair["bundle"] else []),
        "  steps",
        *(_step_line(step) for step in repair["steps"]),
    ]


def _step_line(step: Mapping[str, Any]) -> str:
    detail = f": {step['detail']}" if step["detail"] else ""
    return f"    {clock(step['at'])}  {step['what']}  {outcome(step['ok'])}{detail}"


def _action_line(action: Mapping[str, Any]) -> str:
    detail = f": {action['detail']}" if action["detail"] else ""
    return f"    {clock(action['at'])}  {action['verb']} {action['target']}  {action['outcome']}{detail}"


def _symptom_line(symptom: Mapping[str, Any]) -> str:
    return f"    {clock(symptom['opened_at'])}  {symptom['summary']}  ({symptom['id']})"


def _similar_line(past: Mapping[str, Any]) -> str:
    done = ", ".join(past["done"]) or "nothing"
    outcome = {True: "it helped", False: "it did not help", None: "no attempt was made"}[past["helped"]]
    when = clock(past["opened_at"])
    return f"    {when}  {past['similarity']:.0%} alike: {past['summary']}; done: {done}, {outcome}  ({past['id']})"


def _culprit(culprit: Mapping[str, Any]) -> str:
    return str(Culprit(**culprit))
