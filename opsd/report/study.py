"""The page of a study: effects with their intervals, learning curves, cost. One HTML file, as that of a run. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final

from opsd.ablate.cells import Found, cost_of_all
from opsd.ablate.report import Compared, Report
from opsd.ablate.study import BASELINE, Cost, cost_line
from opsd.agent.web.html import Html, card, facts, h, join, nothing, pill, sparkline, stacked_table
from opsd.charts import Axis, Effect, Point, Series, forest_plot, line_chart
from opsd.report.page import chart_card, page
from opsd.words import plural

MOST_CURVES: Final = 8
"""Arms with a line in the charts. The table has a small one of each arm."""
_POINTS, _SMALL = 200, 24
_MARKS: Final = {"better": 0, "worse": 1, "equivalent": 2, "undecided": 3}
_TONES: Final = {"better": "good", "worse": "bad", "equivalent": "", "undecided": "none"}
_NO_NUMBER: Final = "–"

Curve = Sequence[Point]
"""Step and mean loss."""


def study_page(report: Report) -> str:
    """The page."""
    arms = sorted(report.arms, key=lambda arm: _order(arm, report.study.higher_is_better))
    curves = _curves(report)
    apart = {name: _apart(curve, curves[BASELINE]) for name, curve in curves.items() if name != BASELINE}
    name = report.study.path.name
    parts = [
        chart_card("effects", "Effects", _forest(report, arms)),
        card("verdicts", "Verdicts", _verdicts(report, arms, apart)),
        *_learning(report, arms, curves, apart),
        card("cost", "Cost", _cost(report, arms)),
        _origin(report),
    ]
    return page(f"{name}: ablations", _header(report), parts)


def _order(arm: Compared, higher_is_better: bool) -> tuple[bool, float]:
    """Best arms first, those without a value last."""
    effect = arm.verdict.effect
    return not math.isfinite(effect), (-effect if higher_is_better else effect) if math.isfinite(effect) else 0.0


def _header(report: Report) -> Html:
    study, settings = report.study, report.study.settings
    counts = [(word, sum(arm.verdict.verdict == word for arm in report.arms)) for word in _MARKS]
    pills = join((pill(f"{number} {word}", _TONES[word]) for word, number in counts if number), " ")
    done = sum(each.state == "done" for each in report.found)
    shown: list[tuple[str, object]] = [
        ("metric", f"{settings.metric}, {'higher' if study.higher_is_better else 'lower'} is better"),
        ("alpha", f"{settings.alpha:g} over {plural(len(report.arms), 'arm')}"),
        ("look", f"{report.look} of {settings.looks}"),
        ("seeds", len(study.seeds)),
        ("cells", f"{done} of {len(report.found)} done"),
        ("baseline", settings.baseline),
    ]
    return join((Html(f"<h1>{h(study.path.name)} {pills}</h1>"), facts(shown), *map(nothing, report.doubts)))


def _forest(report: Report, arms: Sequence[Compared]) -> str:
    effects = [
        Effect(
            arm.verdict.name, arm.verdict.effect, arm.verdict.low, arm.verdict.high, _MARKS[arm.verdict.verdict],
            f"{arm.verdict.verdict} {_effect(arm)}",
        )
        for arm in arms
    ]  # fmt: skip
    side = "right" if report.study.higher_is_better else "left"
    label = f"arm minus baseline, {report.unit}; better is {side}"
    return forest_plot("Effects", effects, x=Axis(label), margin=report.study.settings.margin or 0.0)


def _effect(arm: Compared) -> str:
    found = arm.verdict
    if not math.isfinite(found.effect):
        return "without a pair"
    if not math.isfinite(found.low):
        return f"{found.effect:+.3g} (no interval)"
    return f"{found.effect:+.3g} ({found.low:+.3g} to {found.high:+.3g})"


def _verdicts(report: Report, arms: Sequence[Compared], apart: Mapping[str, Curve]) -> Html:
    if not arms:
        return nothing("The study has no arm.")
    loss = [each.loss for each in report.found if each.loss is not None]
    columns = ("Arm", "Verdict", "Effect", "Pairs", "p", "Change", "FLOPs", "Difference of loss", "Why")
    told = {arm.name: arm.settings.set for arm in report.study.arms}
    rows = [_row(arm, told[arm.verdict.name], apart.get(arm.verdict.name, ())) for arm in arms]
    note = nothing(
        "The difference of loss is that from the baseline during the training, drawn from its lowest to its highest."
    )
    return join((stacked_table("Verdicts", columns, rows), *([note] if loss else [])))


def _row(arm: Compared, told: Sequence[str], apart: Curve) -> Sequence[object]:
    found = arm.verdict
    p = _NO_NUMBER if found.adjusted_p is None else f"{found.adjusted_p:.2g}"
    change = ", ".join(told) or "nothing (A/A)"
    if arm.differ:
        change += f"; may differ: {', '.join(arm.differ)}"
    line = sparkline([value for _, value in _thinned(apart, _SMALL)], f"difference of loss of {found.name}")
    return (
        found.name, pill(found.verdict, _TONES[found.verdict]), _effect(arm), found.pairs, p, change,
        f"x {arm.flops:.3g}", line, found.reason,
    )  # fmt: skip


def _curves(report: Report) -> dict[str, Curve]:
    """By arm the mean loss of its seeds, at the steps that all seeds with a loss have reached."""
    found: dict[str, Curve] = {}
    for arm in report.study.arms:
        own = (each for each in report.found if each.cell.arm.name == arm.name and each.state != "refused")
        runs = [each.losses for each in own if each.losses]
        shared = sorted(set.intersection(*(set(losses) for losses in runs))) if runs else []
        found[arm.name] = _thinned(
            [(float(step), _mean([losses[step] for losses in runs])) for step in shared], _POINTS
        )
    return found


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if len(known) == len(values) else math.nan


def _thinned(points: Curve, most: int) -> Curve:
    """The means of at most ``most`` equal parts, which takes the noise of single steps out."""
    size = max(1, math.ceil(len(points) / most))
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [(part[-1][0], fmean(value for _, value in part)) for part in parts]


def _apart(curve: Curve, baseline: Curve) -> Curve:
    """The distance from the baseline where both have a point."""
    known = dict(baseline)
    return [
        (step, value - known[step])
        for step, value in curve
        if step in known and math.isfinite(value) and math.isfinite(known[step])
    ]


def _learning(
    report: Report, arms: Sequence[Compared], curves: Mapping[str, Curve], apart: Mapping[str, Curve]
) -> Iterator[Html]:
    """The losses, and their distance from the baseline, of the arms whose effect is largest."""
    proven = sorted(arms, key=lambda arm: (arm.verdict.verdict in ("undecided", "equivalent"), -_size(arm)))
    chosen = {arm.verdict.name for arm in proven[: MOST_CURVES - 1]}
    names = [arm.verdict.name for arm in arms if arm.verdict.name in chosen]
    of = f" of {len(names)} of {len(arms)} arms, those with the largest effects" if len(names) < len(arms) else ""
    x = Axis("step")
    loss = [Series(BASELINE, curves[BASELINE], strong=True), *(Series(name, curves[name]) for name in names)]
    yield chart_card("loss", f"Loss{of}, mean of the seeds", _chart("loss", loss, x, "cross-entropy, nats per token"))
    distances = [Series(name, apart[name]) for name in names]
    if distances:
        distances = [Series(BASELINE, [(step, 0.0) for step, _ in curves[BASELINE]], strong=True), *distances]
    chart = _chart("difference", distances, x, "loss minus that of the baseline")
    yield chart_card("apart", f"Difference of loss{of}", chart)


def _chart(title: str, series: Sequence[Series], x: Axis, unit: str) -> str:
    drawn = [each for each in series if len(each.points) > 1]
    return line_chart(title, drawn, x=x, y=Axis(unit), width=1100, height=300)


def _size(arm: Compared) -> float:
    return abs(arm.verdict.effect) if math.isfinite(arm.verdict.effect) else 0.0


def _cost(report: Report, arms: Sequence[Compared]) -> Html:
    names = [BASELINE, *(arm.verdict.name for arm in arms)]
    by_arm: dict[str, list[Found]] = {name: [] for name in names}
    for each in report.found:
        by_arm[each.cell.arm.name].append(each)
    rows = [_cost_row(name, by_arm[name], cost_of_all(by_arm[name])) for name in names]
    rows.append(_cost_row("all", report.found, report.cost))
    columns = ("Arm", "Cells done", "GPU-hours", "Preempted", "Recomputed", "Failures")
    said = f"{cost_line(report.cost)}."
    if hours := report.planned_gpu_hours:
        said += (
            f" The main run has {hours:,.0f} GPU-hours in its plan; this is {report.cost.gpu_hours / hours:.1%} of it."
        )
    return join((Html(f"<p>{h(said)}</p>"), stacked_table("Cost", columns, rows)))


def _cost_row(name: str, found: Sequence[Found], cost: Cost) -> Sequence[object]:
    done = sum(each.state == "done" for each in found)
    parts = (cost.gpu_hours, cost.preempted, cost.recomputed, cost.failures)
    return name, f"{done} of {len(found)}", *(f"{hours:,.3f}" for hours in parts)


def _origin(report: Report) -> Html:
    """Code and libraries of all cells."""
    libraries = report.origin.get("libraries") or {}
    rows = [(str(name), str(version)) for name, version in libraries.items()]
    rows += [("commit", str(report.origin["commit"]))] if report.origin.get("commit") else []
    rows += [("uncommitted changes", ", ".join(map(str, dirty)))] if (dirty := report.origin.get("dirty")) else []
    return card("origin", "Made with", stacked_table("Made with", ("", "Version"), rows)) if rows else Html("")
