"""The charts of the pages: what a run has done, and how hot its GPUs are. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum
from typing import Any, Final

from opsd.agent.web.history import LOSS, TOKENS, History
from opsd.agent.web.html import Html, card, h
from opsd.charts import Axis, Limit, Point, Series, Span, Tone, line_chart
from opsd.collectors.base import GpuFact, RankFact, RunFact
from opsd.runbooks.base import Incident, Severity

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
