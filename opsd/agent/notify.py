"""Tell people: a line in the log, and a webhook if there is one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Full, Queue

from opsd.agent.actions import ActionError, Notifier
from opsd.agent.incidents import Transition, is_over
from opsd.agent.logs import Log
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
    """Posts ``{"text": ..., **fields}`` to a URL, and writes to the log as well.

    The URL is a secret: neither it nor the server's answer appears in an error. In place of it there may be the file
    that has it, which is read each time, so that a renewed one is taken up.
    """

    def __init__(self, log: Log, receiver: str | Path) -> None:
        self._to_log = LogNotifier(log)
        self._receiver = receiver

    def __call__(self, text: str, fields: Mapping[str, object]) -> None:
        self._to_log(text, fields)
        import httpx  # 18 MiB and a tenth of a second that an agent without a webhook does not pay

        url = self._url()
        try:
            answer = httpx.post(url, json={"text": text, **fields}, timeout=WEBHOOK_TIMEOUT_S)
        except Exception as error:  # also of proxies and certificates, which the environment names
            raise ActionError(f"the webhook could not be reached: {type(error).__name__}") from error
        if not answer.is_success:  # one that has moved has told nobody
            raise ActionError(f"the webhook answered with status {answer.status_code}")

    def _url(self) -> str:
        if isinstance(self._receiver, str):
            return self._receiver
        try:
            return self._receiver.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ActionError(f"{self._receiver}: the URL of the webhook cannot be read") from error


class Announcer:
    """Tells people about incidents that open, escalate or end, without ever keeping the loop waiting.

    A notifier that is slow or down delays later announcements; beyond ``MAX_WAITING`` they are dropped, as the journal
    and the metrics have them all. ``muted`` says why nobody is to be told of a kind at an epoch second, "" if they are.
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
        self._waiting: Queue[tuple[str, dict[str, object]]] = Queue(MAX_WAITING)
        threading.Thread(target=self._work, name="announce", daemon=True).start()

    def __call__(self, incident: Incident, transition: Transition) -> None:
        """Announce ``transition`` of ``incident`` if it is one that people want to hear of.

        Nobody is told of symptoms, nor each time that an incident which comes and goes is over once more.
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
        with contextlib.suppress(Full):
            self._waiting.put_nowait((text, fields))

    def _work(self) -> None:
        while True:
            text, fields = self._waiting.get()
            try:
                self._notify(text, fields)
            except ActionError as error:
                self._log.warning("announcement failed", reason=str(error))
            except Exception as error:
                self._log.error("announcement failed", reason=f"a bug in opsd: {type(error).__name__}")
