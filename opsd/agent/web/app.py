"""The routes of the HTTP server; all are read-only.

========================= ==========================================================================
``/``                     the page of this node; ``?refresh=5`` reloads it every 5 s
``/fleet``                all nodes: state, runs, incidents, spares; ``?refresh=60``
``/incident/ID``          the page of an incident: timeline, evidence, similar ones, runbook
``/job/ID``               the page of a job, or of a run by its name, with the job's other nodes
``/runbooks/NAME``        the guide of a runbook or an alert; ``/runbooks`` lists them
``/metrics``              every series, Prometheus text or OpenMetrics
``/healthz``              200 while the loop ticks, 503 otherwise
``/readyz``               200 once the first collection is done and while the loop ticks
``/api/v1/…``             JSON, see ``API`` below
========================= ==========================================================================

A slash at the end of a path changes nothing. A refusal is JSON; outside the API it is a page for a browser.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from opsd.agent.loop import Snapshot
from opsd.agent.web import api
from opsd.agent.web.exposition import Exposition, exemplars, is_cached
from opsd.agent.web.fleet import Fleet, JobNodes, NodeOfJob, NodeSummary, node_summary
from opsd.agent.web.history import History
from opsd.agent.web.html import HEADERS, REFRESH_S, problem_page
from opsd.agent.web.ledgers import Ledgers, beside_of, forecast_of
from opsd.runbooks.base import State

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
_CHEAP = frozenset({"/metrics", "/healthz", "/readyz"})
JSON = "application/json; charset=utf-8"
OPENAPI: Final = Path(__file__).with_name("openapi.json")

Answer = tuple[HTTPStatus, bytes, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Request:
    """The relevant parts of a request. ``query`` has every value of every parameter."""

    path: str
    query: Mapping[str, list[str]]
    accept: str = ""
    accept_encoding: str = ""

    @property
    def id(self) -> str:
        """The last part of the path."""
        return unquote(self.path.rpartition("/")[2])

    @property
    def is_of_a_browser(self) -> bool:
        """Whether a person sees the answer: browsers name HTML among what they accept, programs do not."""
        return "text/html" in self.accept.lower() and not self.path.startswith("/api/")


class App:
    """Answers requests from the newest snapshot.

    ``stale_s``: a loop that has not ticked for longer is not healthy. ``job_nodes`` and ``fleet`` may be
    replaced at any time; ``config`` is the state of the configuration.
    """

    def __init__(
        self,
        latest: Callable[[], Snapshot],
        facts: Mapping[str, Any],
        *,
        stale_s: float,
        history: History | None = None,
        ledgers: Ledgers | None = None,
        job_nodes: JobNodes | None = None,
        fleet: Fleet | None = None,
        config: Callable[[], Mapping[str, object]] | None = None,
        job_label: bool = False,
    ) -> None:
        self._latest = latest
        self._facts = facts
        self._history = history or History()
        self._ledgers = ledgers or Ledgers()
        self.job_nodes, self.fleet = job_nodes, fleet
        self._config = config
        self._pages, self._job_pages = PageCache(), PageCache()
        self._stale_s = stale_s
        self._exposition = Exposition(lambda: latest().samples, lambda: exemplars(latest()), job_label=job_label)
        self._routes: Mapping[str, Callable[[Request], Answer]] = {
            "/": self._index,
            "/fleet": self._fleet,
            "/runbooks": lambda _request: _runbook(""),
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            **{route.path: partial(route.answer, self) for route in API},
        }

    @staticmethod
    def is_slow(path: str) -> bool:
        """Whether the answer may have to wait for files of users."""
        return path.startswith("/job/")

    @staticmethod
    def is_cheap(request: Request) -> bool:
        """Whether the answer is made once a tick whoever asks, or is short."""
        return request.path in _CHEAP and (request.path != "/metrics" or is_cached(request.accept))

    def __call__(self, request: Request) -> Answer:
        """The answer to one request. Thread-safe."""
        return readable(request, self._answer(replace(request, path=request.path.removesuffix("/") or "/")))

    def _answer(self, request: Request) -> Answer:
        folder = request.path.rpartition("/")[0]
        if route := self._routes.get(request.path) or self._routes.get(f"{folder}/{{id}}"):
            return route(request)
        if request.path.startswith("/incident/"):
            return self._incident_page(unquote(request.path.removeprefix("/incident/")))
        if request.path.startswith("/job/"):
            return self._job(unquote(request.path.removeprefix("/job/")))
        if request.path.startswith("/runbooks/"):
            return _runbook(request.path.removeprefix("/runbooks/"))
        return problem(HTTPStatus.NOT_FOUND, f"nothing at {request.path}; see /")

    def _metrics(self, request: Request) -> Answer:
        body, headers = self._exposition.render(request.accept, request.accept_encoding)
        return HTTPStatus.OK, body, headers

    def _healthz(self, _request: Request) -> Answer:
        age = time.monotonic() - self._latest().at
        if age > self._stale_s:
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, f"the loop has not ticked for {age:.1f} s")
        return _json({"status": "ok"})

    def _readyz(self, request: Request) -> Answer:
        if self._latest().tick < 0:
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, "the first collection is not done yet")
        return self._healthz(request)

    @property
    def _node(self) -> str:
        return str(self._facts.get("node", ""))

    def _status(self, _request: Request) -> Answer:
        facts = {**self._facts, "config": self._config()} if self._config else self._facts
        return _json(api.status(self._latest(), facts, time.monotonic()))

    def _incidents(self, request: Request) -> Answer:
        states, nested = request.query.get("state", ()), request.query.get("symptoms", ["0"])[-1] == "1"
        return _limited(
            request, lambda limit: api.incident_list(self._latest(), states, limit, node=self._node, nested=nested)
        )

    def _repairs(self, request: Request) -> Answer:
        states = request.query.get("state", ())
        return _limited(request, lambda limit: api.repair_list(self._latest(), states, limit))

    def _repair(self, request: Request) -> Answer:
        found = next((repair for repair in self._latest().repairs if repair.id == request.id), None)
        if found is None:
            return problem(HTTPStatus.NOT_FOUND, "no repair with this id is remembered")
        return _json(api.repair_details(found))

    def _ranks(self, request: Request) -> Answer:
        return _encoded(api.ranks(self._latest(), request.query.get("job", [""])[-1]))

    def _statistics(self, _request: Request) -> Answer:
        return _json(api.incident_statistics(self._latest()))

    def _openapi(self, _request: Request) -> Answer:
        return _encoded(OPENAPI.read_bytes())

    def _incident(self, request: Request) -> Answer:
        latest = self._latest()
        found = api.find(latest, request.id)
        if found is None:
            return problem(HTTPStatus.NOT_FOUND, "no incident with this id is remembered")
        return _json(api.incident_details(latest, found, self._node))

    def _incident_page(self, id: str) -> Answer:
        from opsd.agent.web.incident_page import incident_page

        latest = self._latest()
        found = api.find(latest, id)
        if found is None:
            return problem(HTTPStatus.NOT_FOUND, "no incident with this id is remembered; see /")
        make = partial(incident_page, latest, found, self._node)
        return _page(self._pages.get(("incident", id), latest, time.monotonic(), make))

    def _index(self, request: Request) -> Answer:
        from opsd.agent.web.node_page import node_page

        refresh_s, latest, now = _refresh(request), self._latest(), time.monotonic()

        def make() -> bytes:
            shown = self._history.with_ended(latest)
            return node_page(shown, self._history, self._facts, refresh_s=refresh_s, now=now)

        return _page(self._pages.get(refresh_s, latest, now, make))

    def _summary(self) -> NodeSummary:
        return node_summary(
            self._latest(), self._node, time.monotonic(),
            lambda run: forecast_of(self._ledgers.of(run).ledger),
            lambda run: beside_of(self._ledgers.of(run).ledger).get("ablations", ""),
        )  # fmt: skip

    def _summary_of_node(self, _request: Request) -> Answer:
        return _encoded(self._summary().model_dump_json().encode() + b"\n")

    def _fleet(self, request: Request) -> Answer:
        from opsd.agent.web.fleet_page import ALONE, fleet_page

        refresh_s, view = _refresh(request), self.fleet.view() if self.fleet else ALONE
        key, latest, now = ("fleet", refresh_s), self._latest(), time.monotonic()
        return _page(self._pages.get(key, latest, now, lambda: fleet_page(self._summary(), view, refresh_s=refresh_s)))

    def _job_summary(self, request: Request) -> Answer:
        from opsd.agent.web.job_page import node_of_job

        shown = self._history.with_ended(self._latest())
        summary = node_of_job(shown, request.id, self._node, time.monotonic())
        if summary is None:
            return problem(HTTPStatus.NOT_FOUND, "no run of this job is on this node")
        return _encoded(summary.model_dump_json().encode() + b"\n")

    def _job(self, id: str) -> Answer:
        from opsd.agent.web.job_page import job_page

        latest, now, others = self._latest(), time.monotonic(), self.job_nodes

        def make() -> bytes | None:
            shown, others_of = self._history.with_ended(latest), others.of if others else None
            return job_page(shown, self._history, self._ledgers.of, id, self._node, now, others_of)

        if (body := self._job_pages.get(id, latest, now, make)) is None:
            return problem(HTTPStatus.NOT_FOUND, "no run of this job is on this node; see /")
        return _page(body)


class Parameter(NamedTuple):
    """A parameter of a query. ``schema`` is its JSON Schema; an array may be given several times."""

    name: str
    about: str
    schema: Mapping[str, Any]


class Route(NamedTuple):
    """A route of the API. ``{id}`` in the path is any text. ``shape`` is the type of the answer, or a Record."""

    path: str
    about: str
    answer: Callable[[App, Request], Answer]
    shape: Any
    parameters: tuple[Parameter, ...] = ()


_LIMIT: Final = Parameter(
    "limit", f"How many at most; {MAX_LIMIT} if more are asked for.",
    {"type": "integer", "minimum": 0, "maximum": 999_999_999, "default": DEFAULT_LIMIT},
)  # fmt: skip
_STATES: Final = "Only those in this state; `current` means all that are not over."
_STATE: Final = Parameter(
    "state", _STATES, {"type": "array", "items": {"enum": ["current", *(state.value for state in State)]}}
)
_REPAIR_STATE: Final = Parameter("state", _STATES, {"type": "array", "items": {"type": "string"}})
_WHOLE: Final = Parameter("symptoms", "`1`: symptoms complete, else in brief.", {"enum": ["0", "1"], "default": "0"})
_JOB: Final = Parameter("job", "Only those of the job with this id, or of the run with this name.", {"type": "string"})

API: Final = (
    Route("/api/v1/status", "Collectors, GPUs, ranks, runs, jobs, journal", App._status, api.STATUS),
    Route("/api/v1/ranks", "The rank pages with their recent steps", App._ranks, api.RANKS, (_JOB,)),
    Route("/api/v1/node", "This node in brief, for the fleet page of other nodes", App._summary_of_node, NodeSummary),
    Route("/api/v1/jobs/{id}", "This node's part of a job, for the job's page on others", App._job_summary, NodeOfJob),
    Route("/api/v1/incidents", "Incidents with their symptoms, newest first", App._incidents, api.INCIDENTS,
          (_STATE, _LIMIT, _WHOLE)),
    Route("/api/v1/incidents/{id}", "One incident, and similar past ones", App._incident, api.INCIDENT),
    Route("/api/v1/repairs", "The repairs of this node step by step, newest first", App._repairs, api.REPAIRS,
          (_REPAIR_STATE, _LIMIT)),
    Route("/api/v1/repairs/{id}", "One repair", App._repair, api.REPAIR),
    Route("/api/v1/statistics", "Statistics of incidents by kind", App._statistics, api.STATISTICS),
    Route("/api/v1/openapi.json", "This description", App._openapi, dict[str, Any]),
)  # fmt: skip
"""The routes of the API; ``openapi.json`` is made from them."""


def _limited(request: Request, make: Callable[[int], object]) -> Answer:
    """The result of ``make`` for the limit that the request has."""
    text = request.query.get("limit", [str(DEFAULT_LIMIT)])[-1]
    if not (text.isascii() and text.isdigit()):
        return problem(HTTPStatus.BAD_REQUEST, "limit must be a whole number")
    return _json(make(min(int(text), MAX_LIMIT) if len(text) <= 9 else MAX_LIMIT))


def _refresh(request: Request) -> int:
    wanted = request.query.get("refresh", ["0"])[-1]
    return next((seconds for seconds in REFRESH_S if str(seconds) == wanted), 0)


def _runbook(name: str) -> Answer:
    from opsd.agent.web.incident_page import runbook_list, runbook_page

    body = runbook_page(name) if name else runbook_list()
    if body is None:
        return problem(HTTPStatus.NOT_FOUND, "no runbook has this name; see /runbooks")
    return _page(body)


def _page(body: bytes | None) -> Answer:
    return HTTPStatus.OK, body or b"", HEADERS


def _json(value: object) -> Answer:
    return _encoded(api.encode(value))


def _encoded(body: bytes) -> Answer:
    return HTTPStatus.OK, body, {"Content-Type": JSON}


def problem(status: HTTPStatus, text: str) -> Answer:
    """A refusal as JSON."""
    return status, api.encode({"error": text}), {"Content-Type": JSON}


def readable(request: Request, answer: Answer) -> Answer:
    """``answer``, but a refusal as a page if ``request`` comes from a browser."""
    status, body, _ = answer
    if status is HTTPStatus.OK or not request.is_of_a_browser:
        return answer
    return status, problem_page(status, json.loads(body)["error"]), HEADERS


class PageCache:
    """Caches pages of the newest snapshot for one second. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._of: tuple[Snapshot, int] | None = None
        self._pages: dict[Hashable, bytes | None] = {}

    def get(self, key: Hashable, snapshot: Snapshot, now: float, make: Callable[[], bytes | None]) -> bytes | None:
        """The page ``key``, made by ``make`` unless it was already requested in the second of ``now``.

        While the loop hangs the page of its last snapshot is still made every second, as it shows the snapshot's age.
        """
        with self._guard:
            if self._of is None or self._of[0] is not snapshot or self._of[1] != int(now):
                self._of, self._pages = (snapshot, int(now)), {}
            if key not in self._pages:
                self._pages[key] = make()
            return self._pages[key]
