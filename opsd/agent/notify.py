"""Notifications: a line in the log, and a webhook if configured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Full, Queue

from opsd.agent.actions import ActionError, Notifier
from opsd.agent.incidents import Transition, is_over
from opsd.agent.logs import Log
from opsd.files import read_settings
from opsd.runbooks.base import Incident, State

WEBHOOK_TIMEOUT_S = 5.0
MAX_WAITING = 100


class LogNotifier:
    """Writes notifications to the agent's log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __call__(self, text: str, fields: Mapping[str, object]) -> None:
        self._log.warning("notification", text=text, **fields)


class WebhookNotifier:
    """Posts ``{"text": ..., **fields}`` to a URL, and also writes to the log.

    The URL is a secret: neither it nor the server's answer appears in an error. Instead of the URL a file may be given,
    which is read each time, so that a renewed URL is used.
    """

    def __init__(self, log: Log, receiver: str | Path) -> None:
        self._to_log = LogNotifier(log)
        self._receiver = receiver

    def __call__(self, text: str, fields: Mapping[str, object]) -> None:
        self._to_log(text, fields)
        url = self._url()
        try:
            from opsd.agent.outgoing import send_json  # megabytes that only an agent with a webhook needs

            status, _ = send_json("POST", url, {"text": text, **fields}, WEBHOOK_TIMEOUT_S)
        except Exception as error:  # also of proxies and certificates, which the environment names
            raise ActionError(f"the webhook could not be reached: {type(error).__name__}") from error
        if not 200 <= status < 300:  # redirects are failures, too
            raise ActionError(f"the webhook answered with status {status}")

    def _url(self) -> str:
        if isinstance(self._receiver, str):
            return self._receiver
        try:
            return read_settings(self._receiver).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ActionError(f"{self._receiver}: the URL of the webhook cannot be read") from error


class Announcer:
    """Notifies about incidents that open, escalate or end, without blocking the loop.

    A slow notifier delays later ones; beyond ``MAX_WAITING`` they are dropped, as journal and metrics have them all.
    ``muted`` returns why a kind is silenced at an epoch second, "" if it is not.
    """

    def __init__(
        self,
        notify: Notifier,
        node: str,
        log: Log,
        *,
        muted: Callable[[str, float], str] = lambda _kind, _wall: "",
    ) -> None:
        self._notify, self._node, self._log, self._muted = notify, node, log, muted
        self._waiting: Queue[tuple[str, dict[str, object]] | None] = Queue(MAX_WAITING)
        threading.Thread(target=self._work, name="announce", daemon=True).start()

    def __call__(self, incident: Incident, transition: Transition) -> None:
        """Queue a notification about ``transition`` of ``incident`` if it is relevant.

        There are none about symptoms, nor about each end of an incident that comes back repeatedly.
        """
        over = is_over(incident, transition)
        if incident.cause is not None or (incident.relapses and over):
            return
        if self._muted(incident.kind, transition.at):
            return
        if transition.before is not None and transition.after not in (State.ESCALATED, State.RESOLVED):
            return
        state = "opened" if transition.before is None else transition.after.value
        if over and transition.after is State.ESCALATED:
            state = "over"
        text = f"[{incident.severity}] {self._node}: {incident.kind} {state}: {incident.summary}"
        fields: dict[str, object] = {
            "id": incident.id,
            "culprit": str(incident.culprit),
            "job": incident.job,
            "verdict": incident.verdict,
        }
        try:
            self._waiting.put_nowait((text, fields))
        except Full:
            self._log.warning("announcement dropped", incident=incident.id, reason=f"{MAX_WAITING} are waiting")

    def close(self) -> None:
        """End once what is queued is sent."""
        with contextlib.suppress(Full):
            self._waiting.put_nowait(None)

    def _work(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            text, fields = waiting
            try:
                self._notify(text, fields)
            except ActionError as error:
                self._log.warning("announcement failed", reason=str(error))
            except Exception as error:
                self._log.error("announcement failed", reason=f"a bug in opsd: {type(error).__name__}")
