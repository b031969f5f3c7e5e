"""Actions that the end of an earlier agent cut off: which are carried out now, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from opsd.agent.judge import Judge
from opsd.agent.lifecycle import unfinished
from opsd.agent.policy import HARMLESS, UNCONFIRMED, ActionLimits, needs_witness
from opsd.agent.window import Window
from opsd.runbooks.base import Action, Incident

REPEATABLE = HARMLESS | {"set_power_limit", "swap_node", "drain_node", "comment_job"}
"""Verbs whose second execution changes nothing."""
RESUME_WITHIN_S = 900.0
CONFIRM_WITHIN_S = 30.0
"""how long the drivers have to say again why an action is needed."""
_REMOVAL = ("swap_node", "drain_node")
"""Verbs that take the node out; which of them is wanted depends on whether it still has ranks."""


class ActionRecovery:
    """The actions that wait to be carried out or given up."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, int, float | None]] = []

    def add(self, incident: Incident) -> None:
        """Take in what is under way in an incident that was loaded."""
        self._waiting += [(incident.id, number, None) for number, _ in unfinished(incident)]

    def due(
        self,
        current: Sequence[Incident],
        judge: Judge,
        mode_of: Callable[[str], str],
        limits: ActionLimits,
        view: Window,
    ) -> Iterator[tuple[int, Action, Incident, str]]:
        """Actions to carry out, or with why they are given up: number, action, incident, "" or the reason.

        What changes hardware waits for the word of kernel or driver.
        """
        by_id = {incident.id: incident for incident in current}
        waiting, self._waiting = self._waiting, []
        for name, number, since in waiting:
            incident = by_id.get(name)
            if incident is None:
                continue
            record: Mapping[str, Any] = incident.actions[number]
            action = Action(record["verb"], record["target"], {**record["args"], "resumed": True}, record["reason"])
            refusal = why_not(incident.kind, record, mode_of(incident.kind), limits, view.wall)
            if not refusal and needs_witness(action) and not _confirmed(action, incident, judge, view):
                first_asked = view.now if since is None else since
                if view.now - first_asked < CONFIRM_WITHIN_S:
                    self._waiting.append((name, number, first_asked))
                    continue
                refusal = UNCONFIRMED
            yield number, action, incident, refusal


def why_not(kind: str, record: Mapping[str, Any], mode: str, limits: ActionLimits, now: float) -> str:
    """Why an action that the end of an agent cut off is not to be carried out now, "" if it may be.

    ``record`` is its entry in ``Incident.actions``, ``now`` is in epoch seconds.
    """
    if record.get("resumed"):
        return "the agent has ended twice while this was under way"
    if record["verb"] not in REPEATABLE:
        return "doing it twice could do harm"
    if not abs(now - record["at"]) < RESUME_WITHIN_S:
        return f"it was begun more than {RESUME_WITHIN_S / 60:.0f} minutes ago"
    if record["verb"] not in HARMLESS and mode != "act":
        return f"policy mode is now {mode}"
    return limits.muted(kind, now)


def _confirmed(action: Action, incident: Incident, judge: Judge, view: Window) -> bool:
    verbs = _REMOVAL if action.verb in _REMOVAL else (action.verb,)
    wanted = judge.confirmed(incident, view.witnessed) if incident.kind in judge.runbooks else ()
    return any(one.verb in verbs and one.target == action.target for one in wanted)
