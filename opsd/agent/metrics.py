"""The agent's metrics about itself: collectors, loop, journal, incidents, actions. All exist from the start on."""

from __future__ import annotations

import platform
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Final

from opsd import __version__
from opsd.agent.actions import VERBS
from opsd.agent.brief import brief
from opsd.agent.gather import Health, Source
from opsd.agent.lifecycle import ACKNOWLEDGED, holder
from opsd.collectors.base import Metric, Sample
from opsd.runbooks.base import SHARED_MOUNT, Incident, Severity, State

BUILD = Metric("opsd_build_info", "Release of the agent.", "info", labels=("version", "python"))
COLLECTOR_STATE = Metric(
    "opsd_collector_state",
    "1 for the state the collector is in: ok, limited (a limit leaves something out), no_data (nothing to collect from "
    "here), error, hung, starting.", labels=("collector", "state"),
)  # fmt: skip
COLLECTOR_UP = Metric(
    "opsd_collector_up", "1 if the collector's latest collection delivered.", labels=("collector",), kept=False
)
COLLECTOR_SECONDS = Metric(
    "opsd_collector_duration_seconds", "Duration of the latest collection.", unit="seconds", labels=("collector",),
    kept=False,
)  # fmt: skip
COLLECTOR_ERRORS = Metric(
    "opsd_collector_errors_total", "Collections that raised an exception.", "counter", labels=("collector",),
    kept=False,
)  # fmt: skip
COLLECTOR_AGE = Metric(
    "opsd_collector_last_success_timestamp_seconds",
    "Unix time of the latest collection that delivered; 0 if there was none.", unit="seconds", labels=("collector",),
    kept=False,
)  # fmt: skip
TICK_SECONDS = Metric("opsd_agent_tick_seconds", "Duration of the latest tick of the agent's loop.", unit="seconds")
TICKS = Metric("opsd_agent_ticks_total", "Ticks of the agent's loop.", "counter")
MISSED = Metric("opsd_agent_missed_ticks_total", "Ticks left out because the one before took too long.", "counter")
SERIES = Metric("opsd_agent_window_series", "Series in the agent's window.")
REFUSED = Metric(
    "opsd_agent_window_refused_samples_total", "Samples of series beyond what the window has room for.", "counter"
)
JOURNAL_UP = Metric("opsd_journal_up", "1 if the journal of incidents can be written.")
JOURNAL_BACKLOG = Metric("opsd_journal_backlog_records", "Records that wait in memory to be written.")
JOURNAL_LOST = Metric("opsd_journal_lost_records_total", "Records given up because the backlog was full.", "counter")
RUNBOOK_ERRORS = Metric(
    "opsd_runbook_errors_total", "Exceptions raised by a runbook's functions.", "counter", labels=("kind",)
)
INCIDENTS = Metric(
    "opsd_incidents",
    "Incidents that are not over. Those that a person has acknowledged have the state acknowledged, and those that "
    "another one brought about the state symptom. gpu is that of the culprit, empty if it is none; mount is that of a "
    "network file system, which all its nodes report, and empty for all else.",
    labels=("kind", "severity", "state", "gpu", "mount"),
)
OPENED = Metric("opsd_incidents_opened_total", "Incidents opened since the agent's start.", "counter", labels=("kind",))
OVER_QUOTA = Metric(
    "opsd_incidents_over_quota_users", "Users whose runs have so many incidents that no more of them are opened."
)
COST = Metric(
    "opsd_incidents_gpu_seconds_total",
    "GPU-seconds lost by incidents since the agent's start, where their runbook can tell. Symptoms are left out.",
    "counter", "seconds", ("kind",),
)  # fmt: skip
BRIEF = Metric(
    "opsd_incident_brief_info",
    "Who acts on an incident that is not over, and the next command, which runs on the node in the label on. Symptoms "
    "and acknowledged incidents are left out.", "info", labels=("kind", "gpu", "incident", "acts", "command", "on"),
    kept=False,
)  # fmt: skip
SO_FAR = Metric(
    "opsd_incident_gpu_seconds",
    "GPU-seconds that incidents which are not over have lost so far, where that is known. Symptoms are left out.",
    unit="seconds", labels=("kind", "gpu"), kept=False,
)  # fmt: skip
ACTIONS = Metric(
    "opsd_actions_total", "Actions by what became of them: ok, failed, recommended, refused.", "counter",
    labels=("verb", "outcome"),
)  # fmt: skip
HTTP_CONNECTIONS = Metric("opsd_http_connections", "Open connections to the agent's HTTP server.")
HTTP_REFUSED = Metric(
    "opsd_http_refused_total",
    "Connections closed and requests refused: slow (header or reading took too long), share (its user or address had "
    "too many connections or TLS handshakes, or answers that took too much processor time or memory), full (there were "
    "too many connections), password, certificate (none, or one that web_config does not accept), host (a name that is "
    "not this agent's), malformed.", "counter", labels=("reason",),
)  # fmt: skip
LOG_LOST = Metric(
    "opsd_log_lines_lost_total", "Lines of the agent's log that nobody took: a full pipe, a journal that hangs.",
    "counter",
)  # fmt: skip
CONFIG_OK = Metric(
    "opsd_config_last_reload_successful",
    "1 if the latest attempt to load the configuration succeeded; 0: the one before it is in force.",
)
CONFIG_AT = Metric(
    "opsd_config_last_reload_success_timestamp_seconds", "Unix time at which the configuration in force was loaded.",
    unit="seconds",
)  # fmt: skip
RUN_SECONDS = Metric(
    "opsd_run_seconds_total",
    "Wall clock of a run by bucket of its ledger, on the node of its rank 0; only with agent.run_seconds.", "counter",
    "seconds", ("run", "bucket"),
)  # fmt: skip

RUN_PLANNED = Metric(
    "opsd_run_planned_seconds",
    "Wall clock that the plan of a run has, from plan.json in its folder; only with agent.run_seconds.", unit="seconds",
    labels=("run",),
)  # fmt: skip
RUN_FORECAST = Metric(
    "opsd_run_forecast_seconds", "Wall clock that a run with a plan is expected to take.", unit="seconds",
    labels=("run",),
)  # fmt: skip
RUN_BEYOND = Metric(
    "opsd_run_beyond_plan_seconds",
    "Seconds by which a run is expected to exceed its plan by bucket of its ledger; below 0 it takes less.",
    unit="seconds", labels=("run", "bucket"),
)  # fmt: skip

METRICS = (
    BUILD, COLLECTOR_STATE, COLLECTOR_UP, COLLECTOR_SECONDS, COLLECTOR_ERRORS, COLLECTOR_AGE, TICK_SECONDS, TICKS,
    MISSED, SERIES, REFUSED, JOURNAL_UP, JOURNAL_BACKLOG, JOURNAL_LOST, RUNBOOK_ERRORS, INCIDENTS, OPENED, COST,
    BRIEF, SO_FAR, ACTIONS, OVER_QUOTA, HTTP_CONNECTIONS, HTTP_REFUSED, LOG_LOST, CONFIG_OK, CONFIG_AT,
    RUN_SECONDS, RUN_PLANNED, RUN_FORECAST, RUN_BEYOND,
)  # fmt: skip
LABELS: Final = {
    "version": "one",
    "python": "one",
    "collector": "the collectors of the agent",
    "state": "states of a collector and of an incident",
    "kind": "kinds of runbooks",
    "severity": "severities of incidents",
    "verb": "actions of the agent",
    "outcome": "ok, failed, recommended, refused",
    "reason": "reasons of the HTTP server to refuse",
    "bucket": "buckets of the ledger",
    "gpu": "one per GPU with an incident",
    "incident": "incidents that are not over, 32 at most",
    "acts": "one per incident at a time",
    "command": "one per incident at a time",
    "on": "the node of the incident's culprit",
    "mount": "one per network file system with an incident",
    "run": "runs on the node, 64 at most",
}

MAX_BRIEFS: Final = 32
MAX_LABEL: Final = 400
"""Characters of a label that is a sentence or a command."""
SYMPTOM = "symptom"
CURRENT_STATES = (
    *(s.value for s in (State.OPEN, State.ACTING, State.VERIFYING, State.ESCALATED)),
    ACKNOWLEDGED,
    SYMPTOM,
)
OUTCOMES = ("ok", "failed", "recommended", "refused")


def collector_samples(sources: Sequence[Source], wall_of_zero: float) -> Iterator[Sample]:
    """The states of the collectors. ``wall_of_zero`` is the epoch second of monotonic second 0."""
    for source in sources:
        name = (source.name,)
        for state in Health:
            yield Sample(COLLECTOR_STATE, float(source.health is state), (source.name, state.value))
        yield Sample(COLLECTOR_UP, float(source.health.delivers), name)
        yield Sample(COLLECTOR_SECONDS, source.duration_s, name)
        yield Sample(COLLECTOR_ERRORS, float(source.errors), name)
        at = source.succeeded_at
        yield Sample(COLLECTOR_AGE, 0.0 if at is None else wall_of_zero + at, name)


def runbook_samples(
    kinds: Iterable[str], incidents: Iterable[Incident], opened: Mapping[str, int], errors: Mapping[str, int]
) -> tuple[Sample, ...]:
    """Incidents that are not over, incidents opened, and failures of runbooks, zeros included."""
    current = Counter((i.kind, i.severity, _state_of(i), _gpu_of(i), _mount_of(i)) for i in incidents)
    return _runbook_samples(
        tuple(kinds), frozenset(current.items()), frozenset(opened.items()), frozenset(errors.items())
    )


def _state_of(incident: Incident) -> str:
    if holder(incident):
        return ACKNOWLEDGED
    return SYMPTOM if incident.cause else incident.state.value


def _gpu_of(incident: Incident) -> str:
    return "" if incident.culprit.gpu is None else str(incident.culprit.gpu)


def _mount_of(incident: Incident) -> str:
    return str(incident.data.get(SHARED_MOUNT) or "")


@lru_cache(maxsize=1)
def _runbook_samples(
    kinds: tuple[str, ...],
    incidents: frozenset[tuple[tuple[str, Severity, str, str, str], int]],
    opened: frozenset[tuple[str, int]],
    errors: frozenset[tuple[str, int]],
) -> tuple[Sample, ...]:
    """The samples, rebuilt only after a change."""
    number, begun, failed = dict(incidents), dict(opened), dict(errors)
    samples = [
        Sample(INCIDENTS, float(number.pop((kind, severity, state, "", ""), 0)), (kind, severity.value, state, "", ""))
        for kind in kinds
        for severity in Severity
        for state in CURRENT_STATES
    ]
    samples += [
        Sample(INCIDENTS, float(count), (kind, severity.value, state, gpu, mount))
        for (kind, severity, state, gpu, mount), count in sorted(number.items())
    ]
    for kind in kinds:
        samples.append(Sample(OPENED, float(begun.get(kind, 0)), (kind,)))
        samples.append(Sample(RUNBOOK_ERRORS, float(failed.get(kind, 0)), (kind,)))
    return tuple(samples)


def cost_samples(kinds: Iterable[str], cost: Mapping[str, float]) -> tuple[Sample, ...]:
    """GPU-seconds lost by kind, zeros included."""
    return tuple(Sample(COST, cost.get(kind, 0.0), (kind,)) for kind in kinds)


def brief_samples(incidents: Sequence[Incident], mode_of: Callable[[str], str], node: str) -> Iterator[Sample]:
    """Who acts on the gravest ``incidents``, and what they have lost so far; ``node`` is the agent's own."""
    roots = [i for i in incidents if i.cause is None]
    lost = defaultdict[tuple[str, str], float](float)
    for i in roots:
        lost[i.kind, _gpu_of(i)] += i.cost.gpu_seconds
    yield from (Sample(SO_FAR, seconds, labels) for labels, seconds in sorted(lost.items()) if seconds)
    grave = [*Severity].index
    told_of = sorted((i for i in roots if not holder(i)), key=lambda i: (-grave(i.severity), i.opened_at))
    for i in told_of[:MAX_BRIEFS]:
        told = brief(i, mode_of(i.kind), node)
        whole = told.command if len(told.command) <= MAX_LABEL else f"opsd incidents show {shlex.quote(i.id)}"
        yield Sample(BRIEF, 1.0, (i.kind, _gpu_of(i), i.id, told.acts[:MAX_LABEL], whole, told.on))


def action_samples(actions: Mapping[tuple[str, str], int]) -> tuple[Sample, ...]:
    """Actions by verb and outcome, zeros included."""
    return tuple(Sample(ACTIONS, float(actions.get(pair, 0)), pair) for pair in product(VERBS, OUTCOMES))


def loop_samples(ticks: int, missed: int, tick_s: float, series: int, refused: int) -> Iterator[Sample]:
    """The loop itself."""
    yield Sample(BUILD, 1.0, (__version__, platform.python_version()))
    yield Sample(TICK_SECONDS, tick_s)
    yield Sample(TICKS, float(ticks))
    yield Sample(MISSED, float(missed))
    yield Sample(SERIES, float(series))
    yield Sample(REFUSED, float(refused))


def journal_samples(problem: str, backlog: int, lost: int) -> Iterator[Sample]:
    """The state of the journal; ``problem`` is "" if it can be written."""
    yield Sample(JOURNAL_UP, float(not problem))
    yield Sample(JOURNAL_BACKLOG, float(backlog))
    yield Sample(JOURNAL_LOST, float(lost))


def http_samples(connections: int, refused: Mapping[str, int]) -> Iterator[Sample]:
    """The HTTP server: open connections, and what was refused by reason."""
    yield Sample(HTTP_CONNECTIONS, float(connections))
    for reason, number in refused.items():
        yield Sample(HTTP_REFUSED, float(number), (reason,))


def log_samples(lost: int) -> Iterator[Sample]:
    """The agent's log."""
    yield Sample(LOG_LOST, float(lost))


def reload_samples(problem: str, loaded_at: float) -> Iterator[Sample]:
    """The configuration; ``problem`` is "" if the latest attempt to load it succeeded, at the epoch second."""
    yield Sample(CONFIG_OK, float(not problem))
    yield Sample(CONFIG_AT, loaded_at)
