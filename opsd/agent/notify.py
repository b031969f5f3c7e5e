"""Notifications: a line in the log, and a webhook if configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from opsd.agent.actions import ActionError, Notifier
from opsd.agent.brief import brief
from opsd.agent.by_hand import holder
from opsd.agent.incidents import Transition, is_over, turn_of
from opsd.agent.logs import Log
from opsd.fair_queue import FairQueue
from opsd.notify.receiver import NotifyError, send_to_all
from opsd.runbooks.base import Incident, State

MAX_WAITING = 100
"""Announcements that wait, for each run and for each kind of incident of the node."""
THREADS = 4


class LogNotifier:
    """Writes notifications to the agent's log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __call__(self, text: str, fields: Mapping[str, object]) -> None:
        self._log.warning("notification", text=text, **fields)


class WebhookNotifier:
    """Sends notifications to all receivers that ``where`` names, and also writes them to the log.

    A file with URLs is read each time, so that a renewed URL is used.
    """

    def __init__(self, log: Log, where: str | Path) -> None:
        self._to_log = LogNotifier(log)
        self._where = str(where)

    def __call__(self, text: str, fields: Mapping[str, object]) -> None:
        self._to_log(text, fields)
        try:
            send_to_all(self._where, text, fields)
        except NotifyError as error:
            raise ActionError(str(error)) from error


class Announcer:
    """Notifies about incidents that open, escalate or end, without blocking the loop.

    Runs, and kinds of incidents of the node, take turns, so that a run that has many delays the others little. Beyond
    ``MAX_WAITING`` of one they are dropped, as journal and metrics have them all. ``muted`` returns why a kind is
    silenced at an epoch second, "" if it is not.
    """

    def __init__(
        self,
        notify: Notifier,
        node: str,
        log: Log,
        *,
        muted: Callable[[str, float], str] = lambda _kind, _wall: "",
        mode_of: Callable[[str], str] = lambda _kind: "observe",
    ) -> None:
        self._notify, self._node, self._log, self._muted = notify, node, log, muted
        self._mode_of = mode_of
        self._queue = FairQueue("announce", THREADS, share=1, room=MAX_WAITING)

    def __call__(self, incident: Incident, transition: Transition) -> None:
        """Queue a notification about ``transition`` of ``incident`` if it is relevant.

        There are none about symptoms, nor about each end of an incident that comes back repeatedly. While an
        incident is acknowledged, only its end is announced. Once the acknowledgement is over, it is announced again.
        """
        over = is_over(incident, transition)
        again = transition.before is transition.after and not over and not transition.worse
        if incident.cause is not None or (incident.relapses and over):
            return
        if holder(incident) is not None and not over:
            return
        if self._muted(incident.kind, transition.at):
            return
        told = transition.before is None or over or again or transition.worse or transition.after is State.ESCALATED
        if not told:
            return
        state = "opened" if transition.before is None else "worse" if transition.worse else transition.after.value
        if over and transition.after is State.ESCALATED:
            state = "over"
        text = f"[{incident.severity}] {self._node}: {incident.kind} {state}: {incident.summary}"
        shown = brief(incident, self._mode_of(incident.kind), self._node)
        if again and transition.text:
            text = f"{text}; {transition.text}"
        if not over:
            text = f"{text}; costs: {shown.cost}; {shown.acts}; next: {shown.command}"
        fields: dict[str, object] = {
            "acts": shown.acts,
            "command": shown.command,
            "id": incident.id,
            "node": self._node,
            "kind": incident.kind,
            "severity": incident.severity.value,
            "state": state,
            "culprit": str(incident.culprit),
            "job": incident.job,
            "verdict": incident.verdict,
        }
        if not self._queue.submit(turn_of(incident), partial(self._send, text, fields)):
            self._log.warning("announcement dropped", incident=incident.id, reason=f"{MAX_WAITING} are waiting")

    def close(self) -> None:
        """End once what is queued is sent."""
        self._queue.close(finish=True)

    def _send(self, text: str, fields: Mapping[str, object]) -> None:
        try:
            self._notify(text, fields)
        except ActionError as error:
            self._log.warning("announcement failed", reason=str(error))
        except Exception as error:
            self._log.error("announcement failed", reason=f"a bug in opsd: {type(error).__name__}")
