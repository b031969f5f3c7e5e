"""Notifications about incidents: the log, and a webhook and Grafana if configured."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from opsd.agent.actions import ACTION_DEADLINE_S, ActionError, Notifier
from opsd.agent.brief import brief
from opsd.agent.incidents import Transition, turn_of
from opsd.agent.lifecycle import is_current
from opsd.agent.logs import Log
from opsd.files import read_settings
from opsd.notify.receiver import NotifyError, send_to_all
from opsd.runbooks.base import Incident, State
from opsd.threads import FairQueue

MAX_WAITING = 100
"""Announcements that wait, for each run and for each kind of incident of the node."""
THREADS = 4
TIMEOUT_S = 10.0
MAX_OPEN = 1000
"""Incidents whose annotation, or page, is remembered."""


class AnnotationError(Exception):
    """Grafana did not take an annotation; the message says why in one sentence, without the token."""


class Notifications:
    """Writes notifications to the agent's log, and sends them to all receivers that ``where`` names, None for none.

    A file with URLs is read each time, so that a renewed URL is used.
    """

    def __init__(self, log: Log, where: str | Path | None = None) -> None:
        self._log, self._where = log, where

    def __call__(self, text: str, fields: Mapping[str, object]) -> None:
        self._log.warning("notification", text=text, **fields)
        try:
            if self._where:
                send_to_all(str(self._where), text, fields)
        except NotifyError as error:
            if not error.heard:  # what somebody has heard is not sent again
                raise ActionError(str(error)) from error
            self._log.warning("a receiver has not taken a notification", reason=str(error))


class Background:
    """Sends in threads of its own, so that a slow receiver delays nothing else.

    Runs, and kinds of incidents of the node, take turns, so that a run that has many delays the others little. Beyond
    ``MAX_WAITING`` of one they are dropped, as journal and metrics have them all.
    """

    def __init__(self, what: str, threads: int, log: Log) -> None:
        self._what, self._log = what, log
        self._queue = FairQueue(what, threads, share=1, room=MAX_WAITING)

    def close(self) -> None:
        """End once what is queued is sent."""
        self._queue.close(finish=True)

    def _later(self, incident: Incident, work: Callable[[], None]) -> Future[str]:
        """Have ``work`` done; the result is why that failed, "" if it did not."""
        result = Future[str]()
        if not self._queue.submit(turn_of(incident), lambda: result.set_result(self._try(incident.id, work))):
            result.set_result(f"{MAX_WAITING} are waiting")
            self._log.warning(f"{self._what} dropped", incident=incident.id, reason=result.result())
        return result

    def _try(self, incident: str, work: Callable[[], None]) -> str:
        try:
            work()
        except (ActionError, AnnotationError) as error:
            self._log.warning(f"{self._what} failed", incident=incident, reason=str(error))
            return str(error)
        except Exception as error:
            reason = f"a bug in opsd: {type(error).__name__}"
            self._log.error(f"{self._what} failed", incident=incident, reason=reason)
            return reason
        return ""


class Announcer(Background):
    """The one voice about incidents: a page has the advice of the runbook, and the id, by which pages are merged."""

    def __init__(
        self, notify: Notifier, node: str, log: Log, mode_of: Callable[[str], str] = lambda _: "observe"
    ) -> None:
        super().__init__("announcement", THREADS, log)
        self._notify, self._node, self._mode_of = notify, node, mode_of
        self._pages: OrderedDict[str, Future[str]] = OrderedDict()

    def __call__(self, incident: Incident, news: str) -> Future[str]:
        """Queue a page with ``news`` of ``incident``, see ``agent.incidents.news``; the result is why that failed."""
        state, _, why = news.partition("; ")
        shown = brief(incident, self._mode_of(incident.kind), self._node)
        said = [f"[{incident.severity}] {self._node}: {incident.kind} {state}: {incident.summary}", why]
        if is_current(incident):
            said += [incident.advice, f"costs: {shown.cost}", shown.acts, f"next: {shown.command}"]
        fields: dict[str, object] = {
            "acts": shown.acts, "advice": incident.advice, "command": shown.command, "id": incident.id,
            "node": self._node, "kind": incident.kind, "severity": incident.severity.value, "state": state,
            "culprit": str(incident.culprit), "job": incident.job, "verdict": incident.verdict,
        }  # fmt: skip
        page = partial(self._notify, "; ".join(filter(None, said)), fields)
        sent = self._pages[incident.id] = self._later(incident, page)
        if len(self._pages) > MAX_OPEN:
            self._pages.popitem(last=False)
        return sent

    def wait(self, _text: str, fields: Mapping[str, object]) -> None:
        """Wait until the newest page about the incident ``fields["id"]`` is out. Raises ActionError if it failed."""
        page = self._pages.get(str(fields.get("id")))
        if page is not None and (problem := page.result(ACTION_DEADLINE_S)):
            raise ActionError(problem)


class Annotator(Background):
    """Writes incidents and actions into Grafana as annotations, which every board of opsd shows.

    An incident is a region from its opening to its end, the beginning of an action a point. ``token_file`` is read each
    time, so that a renewed token is used.
    """

    def __init__(self, url: str, token_file: Path, node: str, log: Log) -> None:
        super().__init__("annotation", 1, log)
        self._url, self._token_file, self._node = url.rstrip("/"), token_file, node
        self._ids: OrderedDict[str, int] = OrderedDict()

    def __call__(self, incident: Incident, transition: Transition) -> None:
        """Queue an annotation of ``transition``. Symptoms are not annotated: their cause is."""
        opened, acting = transition.before is None, transition.after is State.ACTING
        if incident.cause is None and (opened or acting or not is_current(incident)):
            self._later(incident, partial(self._annotate, incident, transition))

    def _annotate(self, incident: Incident, transition: Transition) -> None:
        at = round(transition.at * 1000)
        text = f"{incident.kind} on {self._node}: {incident.summary}"
        if transition.before is None:
            self._remember(incident.id, self._send("POST", "", self._body(incident, at, text)))
        elif transition.after is State.ACTING:
            verbs = ", ".join(str(action["verb"]) for action in incident.actions if action.get("outcome") == "running")
            self._send("POST", "", self._body(incident, at, f"{text}: {verbs or 'acting'}"))
        elif (known := self._ids.pop(incident.id, None)) is not None:
            self._send("PATCH", f"/{known}", {"timeEnd": at, "text": f"{text} – {incident.verdict or 'over'}"})
        else:
            body = self._body(incident, round(incident.opened_at * 1000), text)
            self._send("POST", "", {**body, "timeEnd": at})

    def _body(self, incident: Incident, at: int, text: str) -> dict[str, Any]:
        tags = ["opsd", incident.kind, incident.severity.value, f"node:{self._node}"]
        return {"time": at, "text": text, "tags": [*tags, f"job:{incident.job}"] if incident.job else tags}

    def _remember(self, incident: str, answer: Any) -> None:
        number = answer.get("id") if isinstance(answer, dict) else None
        if isinstance(number, int):
            self._ids[incident] = number
            if len(self._ids) > MAX_OPEN:
                self._ids.popitem(last=False)

    def _send(self, method: str, path: str, body: dict[str, Any]) -> Any:
        try:
            token = read_settings(self._token_file).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AnnotationError(f"{self._token_file}: the token cannot be read") from error
        try:
            from opsd.notify.outgoing import send_json  # megabytes that only an agent with annotations needs

            secret = {"Authorization": f"Bearer {token}"}
            status, content = send_json(method, f"{self._url}/api/annotations{path}", body, TIMEOUT_S, secret)
            if 200 <= status < 300:
                return json.loads(content)
        except Exception as error:  # also of proxies and certificates, which the environment names
            raise AnnotationError(f"Grafana does not answer as it should: {type(error).__name__}") from error
        raise AnnotationError(f"Grafana answered with status {status}")
