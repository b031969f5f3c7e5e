"""``opsd drain`` and ``opsd return``: a node out of service, and back."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from opsd import exitcodes
from opsd.commands.agent_client import Agent, NoAgent, Refused
from opsd.commands.settings import BadConfig, load
from opsd.config import Settings
from opsd.files import write_text
from opsd.preflight.checks import CHECKS
from opsd.preflight.command import HISTORY
from opsd.preflight.engine import SelectionError
from opsd.preflight.history import History, HistoryError
from opsd.preflight.proof import newest
from opsd.preflight.report import Report, ReportError
from opsd.slurm import ownership, record
from opsd.slurm.check import may_update_nodes
from opsd.slurm.connect import choose
from opsd.slurm.hostlist import HostlistError, expand
from opsd.slurm.orders import Order, Orders
from opsd.slurm.ownership import Proof, Rules
from opsd.slurm.port import Slurm, SlurmError, SlurmUnavailable

Command = TypeVar("Command", bound=Callable[..., Any])


def _names(_ctx: click.Context, _param: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(name for value in values for name in expand(value)))
    except HostlistError as error:
        raise click.BadParameter(str(error)) from error


def node_options(command: Command) -> Command:
    """Add the nodes, --config, --set and --dry-run to ``command``."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
        click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Change one setting."),
        click.option("--config", "file", type=click.Path(path_type=Path), help="Use FILE."),
        click.argument("nodes", nargs=-1, required=True, callback=_names, metavar="NODE..."),
    ):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Desk:
    """What both commands work with. ``say`` is told each sentence, ``now`` is in epoch seconds."""

    slurm: Slurm
    rules: Rules
    orders: Orders
    say: Callable[[str], None]
    now: float

    def carry_out(self, order: Order, dry_run: bool, evidence: str = "") -> int:
        """Carry out ``order``, or say what it would do; the exit code. Unanswered, it is kept for an agent that may.

        The file ``evidence`` is removed if nothing comes of the order.
        """
        kept = False
        try:
            if against := self._against(order):
                self.say("; ".join(against))
            elif dry_run:
                return self._say_what_would_be_done(order)
            else:
                self._do(order)
                kept = True
                return exitcodes.OK
        except SlurmUnavailable as error:
            self.say(f"Slurm does not answer: {error}")
            kept = not dry_run and self._keep(order)
        except (SlurmError, ValueError) as error:
            self.say(str(error))
        finally:
            if evidence and not kept:
                Path(evidence).unlink(missing_ok=True)
        return exitcodes.FAILED

    def _say_what_would_be_done(self, order: Order) -> int:
        told = f" with the reason {order.told}" if order.told else ""
        would = f"would {order.verb} {', '.join(order.names)}{told}"
        if may_update_nodes(self.slurm):
            self.say(would)
            return exitcodes.OK
        self.say(f"{would}, but this user may not: that needs root, SlurmUser or an operator (sacctmgr)")
        return exitcodes.FAILED

    def _against(self, order: Order) -> list[str]:
        if order.force:
            return []
        comments = self.slurm.comments(order.names)
        records = {name: record.read(comment) for name, comment in comments.items()}
        if order.verb == "drain":
            return ownership.against_drain(self.slurm.nodes(), records, order.names, self.rules, self.now)
        found = {node.name: node for node in self.slurm.nodes(order.names)}
        unknown = [f"Slurm has no node {name}" for name in order.names if name not in found]
        refusals = (
            ownership.against_return(node, records[name], order.checked.get(name), self.rules, self.now)
            for name, node in found.items()
        )
        return [*unknown, *filter(None, refusals)]

    def _do(self, order: Order) -> None:
        if order.verb == "drain":
            done = ownership.drain(self.slurm, order.names, order.told, self.rules, force=order.force, now=self.now)
        else:
            done = ownership.give_back(
                self.slurm, order.names, order.checked, self.rules, force=order.force, now=self.now
            )
        verb = "drained" if order.verb == "drain" else "gave back"
        if done:
            self.say(f"{verb} {', '.join(done)}")
        if rest := [name for name in order.names if name not in done]:
            already = "drained by opsd already" if order.verb == "drain" else "in service already"
            self.say(f"{', '.join(rest)}: {already}")

    def _keep(self, order: Order) -> bool:
        if not self.orders.invited:
            self.say("no agent here may carry the order out later; give it again once Slurm answers")
            return False
        try:
            path = self.orders.put(order)
        except OSError as error:
            self.say(f"the order was not kept either ({error.strerror}); give it again once Slurm answers")
            return False
        self.say(f"kept as {path}; the agent of this node carries it out, once, when Slurm answers again")
        return True


@click.command()
@node_options
@click.option("--reason", "text", required=True, help="Why, in a few words; people read it in sinfo -R.")
@click.option("--kind", help="Kind of trouble, one word. Default: that of the incident, else maintenance.")
@click.option("--incident", help="Incident that this is for, from `opsd incidents`; it is kept as evidence.")
@click.option("--force", is_flag=True, help="Beyond the cap and within the cool-down. Never other people's nodes.")
def drain(
    nodes: tuple[str, ...],
    file: Path | None,
    overrides: tuple[str, ...],
    dry_run: bool,
    text: str,
    kind: str | None,
    incident: str | None,
    force: bool,
) -> int:
    """Let NODE... finish their jobs and take no new ones.

    Names may be hostlists, n[01-04]. All of them are drained, or none. If Slurm does not answer, the agent of this
    machine does it later, once, provided it may: it runs as root, or policy.drain is on. Exits with 0 if they are out
    of service, 1 if a rule stands against it, Slurm refused or does not answer, 2 if the command line is wrong.
    """
    settings = load(file, overrides)
    kind = kind or (incident.rsplit("-", 2)[0] if incident else "maintenance")
    desk = open_desk(settings)
    evidence = "" if dry_run else _write_evidence(settings, file, nodes, text, incident, desk)
    told = ownership.reason(kind, text, incident=incident or ownership.MANUAL, evidence=evidence)
    return desk.carry_out(Order("drain", nodes, desk.now, told, force), dry_run, evidence)


@click.command("return")
@node_options
@click.option("--report", "reports", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Preflight report (--json) of a node that is not this one. Repeatable.")  # fmt: skip
@click.option("--force", is_flag=True, help="Without a passed preflight, and in spite of relapses.")
@click.option("--reason", "text", help="Why, with --force.")
def give_back(
    nodes: tuple[str, ...],
    file: Path | None,
    overrides: tuple[str, ...],
    dry_run: bool,
    reports: tuple[Path, ...],
    force: bool,
    text: str | None,
) -> int:
    """Give NODE... that opsd has drained back to Slurm.

    Each must have passed the preflight of policy.return_profile since its drain; a node that fails again and again
    soon after its return is left to people. If Slurm does not answer, the agent of this machine does it later, once,
    provided it may: it runs as root, or policy.drain is on. Exits with 0 if they are in service, 1 if a rule stands
    against it, Slurm refused or does not answer, 2 if the command line is wrong.
    """
    if force != (text is not None):
        raise click.UsageError("--force and --reason belong together: say why the checks are passed over")
    settings = load(file, overrides)
    desk = open_desk(settings)
    proved = proofs(settings, nodes, [_read_report(path) for path in reports])
    by_force = force and not dry_run
    evidence = _write_evidence(settings, file, nodes, f"given back by force: {text}", None, desk) if by_force else ""
    return desk.carry_out(Order("return", nodes, desk.now, "", force, proved), dry_run, evidence)


def open_desk(settings: Settings) -> Desk:
    """The desk of this machine."""
    return Desk(choose().slurm, Rules.of(settings.policy), Orders(settings.agent.state_dir), click.echo, time.time())


def proofs(settings: Settings, nodes: Sequence[str], reports: Sequence[Report]) -> dict[str, Proof]:
    """The newest preflight of the required profile of each node, from ``reports`` and from this node's history."""
    profile, history = settings.policy.return_profile, History(settings.agent.state_dir / HISTORY)
    try:
        found = {node: newest(node, profile, CHECKS, settings.preflight, history, reports) for node in nodes}
    except (HistoryError, ReportError, SelectionError) as error:
        raise BadConfig(str(error)) from error
    return {node: proof for node, proof in found.items() if proof}


def _read_report(path: Path) -> Report:
    try:
        return Report.from_json(path.read_bytes())
    except (ReportError, OSError) as error:
        raise BadConfig(f"{path}: {error}") from error


def _write_evidence(
    settings: Settings, file: Path | None, nodes: Sequence[str], text: str, incident: str | None, desk: Desk
) -> str:
    """Keep why and by whom, and the incident as the agent knows it, beside the journal; the file's name."""
    document: Mapping[str, object] = {
        "nodes": nodes, "reason": text, "by": getpass.getuser(), "at": desk.now, "incident": incident,
        "document": _incident(file, incident) if incident else None,
    }  # fmt: skip
    path = settings.agent.state_dir / "evidence" / f"node-{desk.now:.0f}-{'-'.join(nodes)[:100]}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(path, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        desk.say(f"the evidence was not kept as {path}: {error.strerror}")
        return ""
    return str(path)


def _incident(file: Path | None, incident: str) -> object:
    try:
        return Agent(None, file).get(f"/api/v1/incidents/{incident}")
    except (NoAgent, Refused) as error:
        return str(error)
