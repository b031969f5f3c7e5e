"""What `opsd drain` and `opsd undrain` share: nodes, policy, orders and evidence."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from opsd import exitcodes
from opsd.commands.agent_client import Agent, NoAgent, Refused
from opsd.commands.options import config_options, option, options
from opsd.config import Settings
from opsd.files import write_text
from opsd.settings.policy import PolicySettings
from opsd.slurm import node_comment, ownership
from opsd.slurm.check import may_update_nodes
from opsd.slurm.connect import choose
from opsd.slurm.deferred import DeferredUpdate, DeferredUpdates
from opsd.slurm.hostlist import HostlistError, expand
from opsd.slurm.port import Slurm, SlurmError, SlurmUnavailable


def names_of(_ctx: click.Context, _param: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    """The nodes in hostlists, as a callback of an argument."""
    try:
        return tuple(dict.fromkeys(name for value in values for name in expand(value)))
    except HostlistError as error:
        raise click.BadParameter(str(error)) from error


node_options = options(
    click.argument("nodes", nargs=-1, required=True, callback=names_of, metavar="NODE..."),
    config_options,
    option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
    option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an order; ``changed`` are the nodes whose state it has changed, ``order`` the file of one kept.

    possible and not_permitted are of a dry run, refused is by a rule or by Slurm.
    """

    result: Literal["done", "possible", "not_permitted", "refused", "kept", "unanswered"]
    changed: Sequence[str] = ()
    order: str = ""

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return exitcodes.OK if self.result in ("done", "possible") else exitcodes.FAILED


class Sentences:
    """Keeps each sentence until it is known what came of the order."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._kept = as_json, list[str]()

    def __call__(self, sentence: str) -> None:
        self._kept.append(sentence)

    def conclude(self, update: DeferredUpdate, outcome: Outcome) -> int:
        """Print the sentences, to stderr if the order was not carried out, or JSON if asked for; the exit code."""
        if self._as_json:
            order = {"verb": update.verb, "nodes": update.names, "reason": update.told}
            click.echo(json.dumps({**order, **asdict(outcome), "sentences": self._kept}, indent=1))
            return outcome.exit_code
        failed = outcome.exit_code != exitcodes.OK
        for sentence in self._kept:
            click.echo(f"opsd: {sentence}" if failed else sentence, err=failed)
        return outcome.exit_code


@dataclass(frozen=True, slots=True)
class NodeService:
    """What both commands work with. ``say`` gets each sentence; ``now`` is in epoch seconds."""

    slurm: Slurm
    policy: PolicySettings
    updates: DeferredUpdates
    say: Callable[[str], None]
    now: float

    def apply(self, update: DeferredUpdate, dry_run: bool, evidence: str = "") -> Outcome:
        """Carry out ``update``, or say what it would do. Unanswered, it is kept for an agent that may.

        The file ``evidence`` is removed if nothing comes of the order.
        """
        outcome = Outcome("refused")
        try:
            if against := self._against(update):
                self.say("; ".join(against))
            elif dry_run:
                outcome = self._preview(update)
            else:
                outcome = Outcome("done", self._do(update))
        except SlurmUnavailable as error:
            self.say(f"Slurm does not answer: {error}")
            outcome = Outcome("unanswered") if dry_run else self._keep(update)
        except (SlurmError, ValueError) as error:
            self.say(str(error))
        finally:
            if evidence and outcome.result not in ("done", "kept"):
                Path(evidence).unlink(missing_ok=True)
        return outcome

    def _preview(self, update: DeferredUpdate) -> Outcome:
        told = f" with the reason {update.told}" if update.told else ""
        would = f"would {update.verb} {', '.join(update.names)}{told}"
        if may_update_nodes(self.slurm):
            self.say(would)
            return Outcome("possible")
        self.say(f"{would}, but this user may not: that needs root, SlurmUser or an operator (sacctmgr)")
        return Outcome("not_permitted")

    def _against(self, update: DeferredUpdate) -> list[str]:
        if update.force:
            return []
        comments = self.slurm.comments(update.names)
        records = {name: node_comment.read(comment) for name, comment in comments.items()}
        if update.verb == "drain":
            return ownership.drain_objections(self.slurm.nodes(), records, update.names, self.policy, self.now)
        found = {node.name: node for node in self.slurm.nodes(update.names)}
        unknown = [f"Slurm has no node {name}" for name in update.names if name not in found]
        refusals = (
            ownership.return_objection(node, records[name], update.checked.get(name), self.policy, self.now)
            for name, node in found.items()
        )
        return [*unknown, *filter(None, refusals)]

    def _do(self, update: DeferredUpdate) -> Sequence[str]:
        if update.verb == "drain":
            done = ownership.drain(self.slurm, update.names, update.told, self.policy, force=update.force, now=self.now)
        else:
            done = ownership.give_back(
                self.slurm, update.names, update.checked, self.policy, force=update.force, now=self.now
            )
        verb = "drained" if update.verb == "drain" else "gave back"
        if done:
            self.say(f"{verb} {', '.join(done)}")
        if rest := [name for name in update.names if name not in done]:
            already = "drained by opsd already" if update.verb == "drain" else "in service already"
            self.say(f"{', '.join(rest)}: {already}")
        return done

    def _keep(self, update: DeferredUpdate) -> Outcome:
        if not self.updates.enabled:
            self.say("no agent here may carry the order out later; give it again once Slurm answers")
            return Outcome("unanswered")
        try:
            path = self.updates.put(update)
        except OSError as error:
            self.say(f"the order was not kept either ({error.strerror}); give it again once Slurm answers")
            return Outcome("unanswered")
        self.say(f"kept as {path}; the agent of this node carries it out, once, when Slurm answers again")
        return Outcome("kept", order=str(path))


def node_service(settings: Settings, say: Callable[[str], None]) -> NodeService:
    """The service of this machine."""
    return NodeService(choose().slurm, settings.policy, DeferredUpdates(settings.agent.state_dir), say, time.time())


def write_evidence(
    settings: Settings, file: Path | None, nodes: Sequence[str], text: str, incident: str | None, service: NodeService
) -> str:
    """Keep why and by whom, and the incident as the agent knows it, beside the journal; the file's name."""
    document: Mapping[str, object] = {
        "nodes": nodes, "reason": text, "by": getpass.getuser(), "at": service.now, "incident": incident,
        "document": _incident(file, incident) if incident else None,
    }  # fmt: skip
    path = settings.agent.state_dir / "evidence" / f"node-{service.now:.0f}-{'-'.join(nodes)[:100]}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(path, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        service.say(f"the evidence was not kept as {path}: {error.strerror}")
        return ""
    return str(path)


def _incident(file: Path | None, incident: str) -> object:
    try:
        return Agent(None, file).get(f"/api/v1/incidents/{incident}")
    except (NoAgent, Refused) as error:
        return str(error)
