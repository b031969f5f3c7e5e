"""What the person on call needs first: what happened, what it costs, who acts, who has it, the next command. Pure.

The page, `opsd incidents show` and notifications all show this brief.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opsd.agent.correlate import joint_gpu_seconds
from opsd.agent.lifecycle import carried_out, failure, holder, who_has_it
from opsd.agent.policy import DRAIN_OFF, HARMLESS, Ruling
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Incident, State
from opsd.words import gpu_time, printable

PLACEHOLDER: Final = re.compile(r"\b(?:NODE|GPU|ID|WATTS|PID|JOB|RUN|WHY|MOUNT|FOLDER|RUN_FOLDER|RUN_DIR)\b")
MAX_REASON: Final = 120
"""Characters of the summary that a drain gets as its reason."""

_DRAIN = "opsd drain NODE --incident ID --reason WHY"
_FIRST: Final = {book.kind: book.first for book in RUNBOOKS}
_WORDS: Final[Mapping[str, tuple[str, str]]] = {
    "set_power_limit": ("set the power limit of GPU {gpu} to {watts:g} W", "nvidia-smi -i GPU -pl WATTS"),
    "kill_process": ("kill process {pid}", "kill -KILL PID"),
    "restart_generation": ("restart the ranks of the run", ""),
    "swap_node": ("swap {node} for a spare", "opsd swap NODE"),
    "drain_node": ("drain {node}", _DRAIN),
}
"""Each action of opsd as text, and the command for it. Placeholders are those of the guides."""


@dataclass(frozen=True, slots=True)
class Brief:
    """``command`` has no placeholder left; node-local commands run on the node ``on``.

    ``owner`` is who has the incident, else the command by which a person takes it; "" once it is over.
    """

    happened: str
    cost: str
    acts: str
    command: str
    on: str
    owner: str = ""


def brief(incident: Incident, mode: str, node: str, symptoms: Sequence[Incident] = ()) -> Brief:
    """The brief of ``incident``; ``mode`` is the policy's for its kind, ``node`` the agent's own."""
    acts = _acts(incident, mode)
    happened = f"{printable(incident.summary)}, on {incident.culprit.node or node}"
    on = incident.culprit.node or node
    command = _command(incident, acts, node)
    return Brief(happened, cost_now(incident, symptoms), acts, command, on, _owner(incident))


def _owner(incident: Incident) -> str:
    if incident.resolved_at is not None or holder(incident) is not None:
        return who_has_it(incident)
    who = who_has_it(incident) or "nobody"
    return f"{who}; take it: opsd incidents ack {shlex.quote(incident.id)}"


def cost_now(incident: Incident, symptoms: Sequence[Incident] = ()) -> str:
    """The cost as text, for every page and message. While it lasts that is the present loss, then the sum.

    The sum is that with its ``symptoms``; overlapping losses count once.
    """
    seconds = joint_gpu_seconds([incident, *symptoms])
    so_far = gpu_time(seconds) if seconds else ""
    if incident.resolved_at is not None:
        said = "" if incident.cost.gpus else incident.cost.text  # a share is only of the last moment
        return "; ".join(filter(None, (said, so_far and f"{so_far} altogether"))) or "nothing that is known"
    return "; ".join(filter(None, (incident.cost.text, so_far and f"{so_far} so far"))) or "not known"


def values(incident: Incident, node: str) -> dict[str, str]:
    """What is known of the placeholders of guides and commands, quoted for a shell."""
    data = incident.data
    args: dict[str, object] = {}
    for action in (*incident.actions, *incident.proposed):
        given = action.get("args")
        args |= dict(given) if isinstance(given, Mapping) else {}
    gpu = incident.culprit.gpu if incident.culprit.gpu is not None else data.get("gpu")
    watts = args.get("watts", data.get("watts"))
    folder = data.get("folder")
    found: dict[str, object] = {
        "NODE": incident.culprit.node or node,
        "ID": incident.id,
        "GPU": gpu,
        "WATTS": f"{watts:g}" if isinstance(watts, int | float) else None,
        "PID": args.get("pid", data.get("pid")),
        "JOB": incident.job,
        "RUN": incident.run,
        "WHY": printable(incident.summary[:MAX_REASON]).strip() or incident.kind,
        "MOUNT": data.get("mount"),
        **dict.fromkeys(("FOLDER", "RUN_FOLDER", "RUN_DIR"), folder),
    }
    return {name: shlex.quote(printable(str(value))) for name, value in found.items() if value not in (None, "")}


def fill(text: str, known: Mapping[str, str], escape: Callable[[str], str] = str) -> str:
    """``text`` with the placeholders that are known replaced; the others stay."""
    return PLACEHOLDER.sub(lambda match: escape(known.get(match[0], match[0])), text)


def _acts(incident: Incident, mode: str) -> str:
    """Who acts, beginning with "you", "opsd" or "nobody". That people were notified is no action of opsd."""
    if incident.resolved_at is not None:
        return "nobody has to act: it is over"
    if incident.cause is not None:
        return f"nobody acts on a symptom: its cause is {incident.cause}"
    remedy, done = " and ".join(_remedies(incident, mode)), carried_out(incident)
    unable = f"you act: opsd could not end it ({incident.verdict})" if incident.verdict else "you act"
    if incident.state is State.ACTING and any(action["outcome"] == "running" for action in done):
        return f"opsd acts: it will {remedy}" if remedy else "opsd acts"
    if incident.state is State.VERIFYING and done:
        failed = failure(incident)
        why = f"you act: opsd could not {remedy or 'act'} ({failed.get('detail', '')})" if failed else ""
        return why or "opsd has acted and checks whether it helped"
    if incident.state is State.ESCALATED and (done or incident.relapses):
        return unable
    if mode == "observe":
        return f"you act: opsd only observes; it would {remedy}" if remedy else "you act: opsd only observes"
    if not remedy:
        return f"you act: {DRAIN_OFF if _drain_is_off(incident) else 'opsd has no remedy for this'}"
    if mode == "recommend":
        return f"you act: opsd recommends to {remedy}"
    refused = [a for a in incident.actions if a.get("outcome") == Ruling.REFUSE and a.get("verb") not in HARMLESS]
    if refused:
        return f"you act: opsd may not {remedy} now ({refused[-1].get('detail', '')})"
    return unable if incident.state is State.ESCALATED else f"opsd acts: it will {remedy}"


def _drain_is_off(incident: Incident) -> bool:
    drains = [action for action in incident.actions if action.get("verb") == "drain_node"]
    return bool(drains) and drains[-1].get("detail") == DRAIN_OFF


def _remedies(incident: Incident, mode: str) -> Iterator[str]:
    """The actions that opsd would take, as text. Notifications are not among them, nor what it may not in mode act."""
    off = mode == "act" and _drain_is_off(incident)
    for action in incident.proposed:
        if off and action.get("verb") == "drain_node":
            continue
        words, _ = _WORDS.get(str(action.get("verb")), ("", ""))
        args = action.get("args")
        if words and isinstance(args, Mapping):
            try:
                yield words.format(**args)
            except (KeyError, ValueError, TypeError):
                yield str(action.get("verb")).replace("_", " ")


def _command(incident: Incident, acts: str, node: str) -> str:
    """The next command: the remedy's own, else the first of its runbook whose placeholders are all known."""
    if incident.cause is not None and incident.resolved_at is None:
        return f"opsd incidents show {shlex.quote(incident.cause)}"
    if not acts.startswith("you"):
        return f"opsd incidents show {shlex.quote(incident.id)}"
    known = values(incident, node)
    remedies = (_WORDS.get(str(action.get("verb")), ("", ""))[1] for action in incident.proposed)
    for template in (*filter(None, remedies), *_FIRST.get(incident.kind, ())):
        if set(PLACEHOLDER.findall(template)) <= known.keys():
            return fill(template, known)
    return f"opsd runbook show {incident.kind}"
