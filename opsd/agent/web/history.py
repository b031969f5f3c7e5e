"""What pages remember: the last minutes of the few series that they draw, and runs that have ended.

Written by the loop, read by requests.

The charts of the pages: what a run has done, and how hot its GPUs are. Pure.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum
from typing import Any, Final, NamedTuple

from opsd.agent.loop import Snapshot
from opsd.agent.web.html import Html, card, h
from opsd.charts import Axis, Limit, Point, Series, Span, Tone, line_chart
from opsd.collectors.base import GpuFact, RankFact, RunFact
from opsd.runbooks.base import Incident, Severity

POINTS: Final = 120
EVERY_S: Final = 10.0
"""Twenty minutes altogether; 1 KiB a series."""
RECENT: Final = 30
"""Points of a sparkline."""

MAX_ENDED: Final = 16
ENDED_S: Final = 86_400.0
"""How many runs that have ended the pages remember, and for how long; the collector forgets them after a minute."""

THROTTLED: Final = "opsd_gpu_throttle_seconds_total"
THROTTLES: Final = ("sw_thermal", "hw_thermal", "hw_slowdown", "hw_power_brake")
TOKENS: Final = "opsd_rank_tokens_per_second"
LOSS: Final = "opsd_rank_loss"
_BY_GPU: Final = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK")

Key = tuple[str, str]
"""Name of the series, and UUID of the GPU or name of the run."""


class History:
    """``note`` stores a point every ``every_s`` seconds; ended series are dropped, ended runs kept."""

    def __init__(self, *, points: int = POINTS, every_s: float = EVERY_S) -> None:
        self._points, self.every_s = points, every_s
        self._at = float("-inf")
        self._seen = _Seen(array("d"), {})
        self._runs: dict[str, tuple[RunFact, float]] = {}

    def note(self, snapshot: Snapshot) -> None:
        """Store a point from ``snapshot`` if one is due."""
        if snapshot.at - self._at < self.every_s:
            return
        self._at = snapshot.at
        old, series = self._seen, {}
        for key, value in current(snapshot).items():
            if math.isfinite(value):
                series[key] = self._with(old.series.get(key), value)
        self._seen = _Seen(self._with(old.times, snapshot.wall), series)
        self._remember(snapshot)

    def with_ended(self, snapshot: Snapshot) -> Snapshot:
        """``snapshot`` with the runs that have ended since, newest first after those that it has."""
        present = {run.run for run in snapshot.runs}
        ended = [run for run, _ in reversed(self._runs.values()) if run.run not in present]
        return replace(snapshot, runs=(*snapshot.runs, *ended)) if ended else snapshot

    def _remember(self, snapshot: Snapshot) -> None:
        runs = {name: seen for name, seen in self._runs.items() if snapshot.wall - seen[1] < ENDED_S}
        for run in snapshot.runs:
            runs.pop(run.run, None)
            runs[run.run] = run, snapshot.wall
        self._runs = dict([*runs.items()][-max(MAX_ENDED, len(snapshot.runs)) :])

    def values(self, name: str, of: str) -> tuple[float, ...]:
        """The newest points of a series, oldest first, as many as a sparkline has."""
        return tuple(self._seen.series.get((name, of), ())[-RECENT:])

    def points(self, name: str, of: str) -> list[tuple[float, float]]:
        """All points of a series with their epoch seconds, oldest first."""
        seen = self._seen
        values = seen.series.get((name, of), _NONE)
        return [*zip(seen.times[len(seen.times) - len(values) :], values, strict=True)]

    def _with(self, past: array[float] | None, value: float) -> array[float]:
        """A copy with one point more: requests read while the loop writes."""
        grown = array("d") if past is None else past[-(self._points - 1) :]
        grown.append(value)
        return grown


class _Seen(NamedTuple):
    """Times, and series that all end at the last of them."""

    times: array[float]
    series: Mapping[Key, array[float]]


_NONE: Final = array("d")


def current(snapshot: Snapshot) -> dict[Key, float]:
    """The newest values: gauges of GPUs by UUID, worst throttle counter by UUID, tokens/s and loss by run."""
    found: dict[Key, float] = {}
    for metric, value, labels in snapshot.select(*_BY_GPU, THROTTLED, TOKENS, LOSS):
        name = metric.name
        if name in _BY_GPU:
            found[name, labels[1]] = value
        elif name == THROTTLED and labels[2] in THROTTLES:
            found[name, labels[1]] = max(value, found.get((name, labels[1]), 0.0))
        elif name == TOKENS:
            found[name, labels[0]] = found.get((name, labels[0]), 0.0) + value
        elif name == LOSS:
            found.setdefault((name, labels[0]), value)
    return found


MAX_GPUS: Final = 16
MAX_SPANS: Final = 40
WIDTH: Final = 520
HEIGHT: Final = 220
_CLOCK: Final = Axis("local time", "clock")
_LEAST_SHARE: Final = 0.01
"""Phases that take less of the step are not drawn."""


def run_charts(
    run: RunFact, ranks: Sequence[RankFact], history: History, ledger: Mapping[str, Any] | None,
    incidents: Sequence[Incident], wall: float,
) -> Html:  # fmt: skip
    """Loss and tokens/s over the time of the run, or of the last minutes, and the last steps by phase; "" if unknown.

    Incidents shade the time that they lasted.
    """
    curves = (ledger or {}).get("curves") or {}
    spans = _spans(incidents, wall)
    loss = _points(curves.get("loss")) or history.points(LOSS, run.run)
    tokens = _points(curves.get("tokens_per_s")) or history.points(TOKENS, run.run)
    took = _points(curves.get("step_s"))
    charts = [
        _chart("Loss", [Series("loss", loss)], Axis("loss"), spans),
        _chart("Throughput", [Series("tokens/s", tokens)], Axis("tokens/s", from_zero=True), spans),
        _chart("Step time", [Series("step", took)], Axis("seconds a step", from_zero=True), spans),
        _phases(ranks),
    ]
    return _card(f"course-{run.run}", f"Course of {run.run}", charts)


def gpu_charts(
    gpus: Sequence[GpuFact], history: History, incidents: Sequence[Incident], wall: float, *, limit_c: float | None
) -> Html:
    """Temperature and clock of the GPUs over the last minutes; ``limit_c`` is where they slow down, None if unknown."""
    guilty = {i.culprit.gpu for i in incidents if i.resolved_at is None}

    def of(name: str) -> list[Series]:
        shown = [(gpu, history.points(name, gpu.uuid)) for gpu in gpus[:MAX_GPUS]]
        return [Series(f"GPU {gpu.index}", points, strong=gpu.index in guilty) for gpu, points in shown]

    spans = _spans(incidents, wall)
    limits = [] if limit_c is None else [Limit("slows down", limit_c)]
    charts = [
        _chart("Temperature", of("DCGM_FI_DEV_GPU_TEMP"), Axis("°C"), spans, limits),
        _chart("SM clock", of("DCGM_FI_DEV_SM_CLOCK"), Axis("MHz"), spans),
    ]
    return _card("heat", "Heat and clocks of the last 20 minutes", charts)


def _chart(title: str, series: Sequence[Series], y: Axis, spans: Sequence[Span], limits: Sequence[Limit] = ()) -> str:
    drawn = [each for each in series if len(each.points) > 1]
    return _figure(
        title, line_chart(title, drawn, x=_CLOCK, y=y, spans=spans, limits=limits, width=WIDTH, height=HEIGHT)
    )


def _phases(ranks: Iterable[RankFact]) -> str:
    """The mean over ``ranks`` of each phase of their last steps."""
    spent: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for step in rank.steps:
            for phase, seconds in {"whole step": step.duration_s, **step.phase_s}.items():
                spent[phase][step.step].append(seconds)
    means = {phase: sorted((float(step), fsum(s) / len(s)) for step, s in of.items()) for phase, of in spent.items()}
    total = {phase: fsum(seconds for _, seconds in points) for phase, points in means.items()}
    most = total.get("whole step", 0.0)
    shown = sorted((p for p, s in total.items() if s > _LEAST_SHARE * most), key=lambda phase: -total[phase])[:6]
    series = [Series(phase, means[phase]) for phase in shown if len(means[phase]) > 1]
    x, y = Axis("step"), Axis("seconds", from_zero=True)
    title = "Step time by phase, ranks here"
    return _figure(title, line_chart(title, series, x=x, y=y, width=WIDTH, height=HEIGHT))


def _figure(title: str, chart: str) -> str:
    return f"<figure><figcaption>{h(title)}</figcaption>{chart}</figure>" if chart else ""


def _points(curve: object) -> list[Point]:
    """A curve as it comes from JSON."""
    return [(float(at), float(value)) for at, value in curve] if isinstance(curve, list) else []


def _spans(incidents: Sequence[Incident], wall: float) -> list[Span]:
    """When incidents were open; those of one kind that overlap are one span."""
    tones: Mapping[Severity, Tone] = {Severity.CRITICAL: "bad", Severity.WARNING: "warn", Severity.INFO: "none"}
    merged: list[Span] = []
    last: dict[str, int] = {}
    for i in sorted((i for i in incidents if i.cause is None), key=lambda incident: incident.opened_at):
        end = wall if i.resolved_at is None else i.resolved_at
        before = merged[last[i.kind]] if i.kind in last else None
        if before is not None and i.opened_at <= before.end:
            merged[last[i.kind]] = replace(before, end=max(end, before.end))
        else:
            last[i.kind] = len(merged)
            merged.append(Span(i.opened_at, end, i.summary, tones[i.severity]))
    return merged[-MAX_SPANS:]


def _card(id: str, title: str, charts: Iterable[str]) -> Html:
    drawn = [chart for chart in charts if chart]
    return card(h(id), title, Html(f'<div class="charts">{"".join(drawn)}</div>')) if drawn else Html("")
