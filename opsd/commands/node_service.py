"""What `opsd drain` and `opsd return` share: nodes, rules, orders and evidence."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from opsd import exitcodes
from opsd.commands.agent_client import Agent, NoAgent, Refused
from opsd.commands.options import config_options, option, options
from opsd.config import Settings
from opsd.files import write_text
from opsd.slurm import node_comment, ownership
from opsd.slurm.check import may_update_nodes
from opsd.slurm.connect import choose
from opsd.slurm.deferred import DeferredUpdate, DeferredUpdates
from opsd.slurm.hostlist import HostlistError, expand
from opsd.slurm.ownership import Rules
from opsd.slurm.port import Slurm, SlurmError, SlurmUnavailable


def _names(_ctx: click.Context, _param: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(name for value in values for name in expand(value)))
    except HostlistError as error:
        raise click.BadParameter(str(error)) from error


node_options = options(
    click.argument("nodes", nargs=-1, required=True, callback=_names, metavar="NODE..."),
    config_options,
    option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
)


@dataclass(frozen=True, slots=True)
class NodeService:
    """What both commands work with. ``say`` is told each sentence, ``now`` is in epoch seconds."""

    slurm: Slurm
    rules: Rules
    updates: DeferredUpdates
    say: Callable[[str], None]
    now: float

    def apply(self, update: DeferredUpdate, dry_run: bool, evidence: str = "") -> int:
        """Carry out ``update``, or say what it would do; the exit code. Unanswered, it is kept for an agent that may.

        The file ``evidence`` is removed if nothing comes of the order.
        """
        kept = False
        try:
            if against := self._against(update):
                self.say("; ".join(against))
            elif dry_run:
                return self._say_what_would_be_done(update)
            else:
                self._do(update)
                kept = True
                return exitcodes.OK
        except SlurmUnavailable as error:
            self.say(f"Slurm does not answer: {error}")
            kept = not dry_run and self._keep(update)
        except (SlurmError, ValueError) as error:
            self.say(str(error))
        finally:
            if evidence and not kept:
                Path(evidence).unlink(missing_ok=True)
        return exitcodes.FAILED

    def _say_what_would_be_done(self, update: DeferredUpdate) -> int:
        told = f" with the reason {update.told}" if update.told else ""
        would = f"would {update.verb} {', '.join(update.names)}{told}"
        if may_update_nodes(self.slurm):
            self.say(would)
            return exitcodes.OK
        self.say(f"{would}, but this user may not: that needs root, SlurmUser or an operator (sacctmgr)")
        return exitcodes.FAILED

    def _against(self, update: DeferredUpdate) -> list[str]:
        if update.force:
            return []
        comments = self.slurm.comments(update.names)
        records = {name: node_comment.read(comment) for name, comment in comments.items()}
        if update.verb == "drain":
            return ownership.drain_objections(self.slurm.nodes(), records, update.names, self.rules, self.now)
        found = {node.name: node for node in self.slurm.nodes(update.names)}
        unknown = [f"Slurm has no node {name}" for name in update.names if name not in found]
        refusals = (
            ownership.return_objection(node, records[name], update.checked.get(name), self.rules, self.now)
            for name, node in found.items()
        )
        return [*unknown, *filter(None, refusals)]

    def _do(self, update: DeferredUpdate) -> None:
        if update.verb == "drain":
            done = ownership.drain(self.slurm, update.names, update.told, self.rules, force=update.force, now=self.now)
        else:
            done = ownership.give_back(
                self.slurm, update.names, update.checked, self.rules, force=update.force, now=self.now
            )
        verb = "drained" if update.verb == "drain" else "gave back"
        if done:
            self.say(f"{verb} {', '.join(done)}")
        if rest := [name for name in update.names if name not in done]:
            already = "drained by opsd already" if update.verb == "drain" else "in service already"
            self.say(f"{', '.join(rest)}: {already}")

    def _keep(self, update: DeferredUpdate) -> bool:
        if not self.updates.enabled:
            self.say("no agent here may carry the order out later; give it again once Slurm answers")
            return False
        try:
            path = self.updates.put(update)
        except OSError as error:
            self.say(f"the order was not kept either ({error.strerror}); give it again once Slurm answers")
            return False
        self.say(f"kept as {path}; the agent of this node carries it out, once, when Slurm answers again")
        return True


def node_service(settings: Settings) -> NodeService:
    """The service of this machine."""
    return NodeService(
        choose().slurm, Rules.of(settings.policy), DeferredUpdates(settings.agent.state_dir), click.echo, time.time()
    )


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
