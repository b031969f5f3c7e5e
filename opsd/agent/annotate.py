"""Write incidents and actions into Grafana as annotations, which every board of opsd shows.

An incident is a region from its opening to its end, the beginning of an action a point. A thread writes to Grafana, so
that a slow one delays nothing else, for runs and kinds of incidents in turn. Beyond ``MAX_WAITING`` annotations of one
they are dropped; the journal has them all.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

from opsd.agent.incidents import Transition, turn_of
from opsd.agent.lifecycle import is_current
from opsd.agent.logs import Log
from opsd.fair_queue import FairQueue
from opsd.files import read_settings
from opsd.runbooks.base import Incident, State

TIMEOUT_S = 10.0
MAX_WAITING = 100
MAX_OPEN = 1000
"""Incidents whose annotation is remembered until they end."""


class AnnotationError(Exception):
    """Grafana did not take an annotation; the message says why in one sentence, without the token."""


class Annotator:
    """A listener of the incident manager. ``token_file`` is read each time, so that a renewed token is used."""

    def __init__(self, url: str, token_file: Path, node: str, log: Log) -> None:
        self._url, self._token_file, self._node, self._log = url.rstrip("/"), token_file, node, log
        self._ids: OrderedDict[str, int] = OrderedDict()
        self._queue = FairQueue("annotate", 1, share=1, room=MAX_WAITING)

    def __call__(self, incident: Incident, transition: Transition) -> None:
        """Queue an annotation of ``transition``. Symptoms are not annotated: their cause is."""
        opened, acting = transition.before is None, transition.after is State.ACTING
        if incident.cause is None and (opened or acting or not is_current(incident)):
            self._queue.submit(turn_of(incident), partial(self._write, incident, transition))

    def close(self) -> None:
        """End once what is queued is sent."""
        self._queue.close(finish=True)

    def _write(self, incident: Incident, transition: Transition) -> None:
        try:
            self._annotate(incident, transition)
        except AnnotationError as error:
            self._log.warning("annotation failed", incident=incident.id, reason=str(error))
        except Exception as error:
            reason = f"a bug in opsd: {type(error).__name__}"
            self._log.error("annotation failed", incident=incident.id, reason=reason)

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
