"""Reports of runs as one HTML page: of one run, and of several beside each other.

The report of a run, or a plan, as one HTML file: no scripts, nothing loaded from elsewhere, light and dark. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from opsd.agent.web.html import STYLE, Html, card, facts, h, join, nothing, pill, stacked_table
from opsd.charts import CHART_STYLE, Axis, Series, Span, line_chart
from opsd.exitcodes import OK
from opsd.plan.forecast import DAY_S, told
from opsd.plan.plan import Plan
from opsd.plan.text import sections, source_of
from opsd.report.run import STARVED, Price, RunReport, Step, cost_line
from opsd.report.text import restart_line, scores_of
from opsd.words import clock, count, duration, first_line, plural

MAX_ROWS = 200
"""Rows of a table; what has no room is counted."""
_BAR_WIDTH = 160
_PROFILE_WIDTH, _ROW = 256, 18
"""Pixels."""
_EXTRA_STYLE = (
    ".bar{fill:#0b5cad}@media(prefers-color-scheme:dark){.bar{fill:#7fb8f5}}@media print{.card{break-inside:avoid}}"
    "@media(max-width:40rem){.chart{min-width:48rem}}"
)
_CLOCK = Axis("time", "clock")


def report_page(run: RunReport, price: Price) -> str:
    """The page."""
    parts = [
        _charts(run),
        _restarts(run),
        _ledger(run),
        _plan(run),
        _ablations(run),
        _data(run),
        _checkpoints(run),
        _evaluations(run),
        _experts(run),
        _listed("slow", "Slow nodes and ranks", [(text,) for text in run.slow], ("Finding",)),
        _listed("events", "Events", [(clock(t), text) for t, text in run.incidents], ("Time", "Event")),
    ]
    return page(f"{run.run}: report", _header(run, price), parts)


def page(title: str, header: Html, parts: Sequence[Html]) -> str:
    """A file with these parts."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{h(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{STYLE}{CHART_STYLE}{_EXTRA_STYLE}</style></head>"
        f'<body><header>{header}</header><main id="main">{join(parts)}</main></body></html>\n'
    )


def chart_card(id: str, title: str, chart: str) -> Html:
    """A chart with its heading; nothing for a chart without points."""
    if not chart:
        return Html("")
    return card(id, title, Html(f'<div class="scroll" role="group" tabindex="0" aria-label="{h(title)}">{chart}</div>'))


def points(
    steps: Sequence[Step], x: Callable[[Step], float], y: Callable[[Step], float]
) -> Iterator[tuple[float, float]]:
    """Points of a chart over time, with a gap between two generations."""
    for before, step in zip((None, *steps), steps, strict=False):
        if before is not None and before.generation != step.generation:
            yield x(step), math.nan
        yield x(step), y(step)


def _header(run: RunReport, price: Price) -> Html:
    ok = run.exit_code == OK
    state = pill(run.state, "good" if ok else "none" if run.exit_code is None else "warn")
    shown = [
        ("ran", f"{clock(run.began)} to {clock(run.ended)}"),
        ("ranks", run.world_size),
        ("nodes", ", ".join(run.nodes[:8]) + (f" and {len(run.nodes) - 8} more" if len(run.nodes) > 8 else "")),
        ("steps", f"{run.ledger.steps:,}"),
        *([("tokens", count(run.tokens))] if run.tokens is not None else []),
        ("wall clock", duration(run.ledger.wall_s)),
        *([("ETTR", f"{run.ledger.ettr:.1%}")] if run.steps else []),
        ("restarts", len(run.restarts)),
        *([("cost", cost)] if (cost := cost_line(run, price)) else []),
    ]
    reason = nothing(first_line(run.reason)) if run.reason and not ok else Html("")
    return join((Html(f"<h1>{h(run.run)} {state}</h1>"), facts(shown), reason))


def _charts(run: RunReport) -> Html:
    spans = [
        Span(restart.t, restart.t + max(restart.down_s or 0.0, 1.0), f"{restart.cause}: {restart_line(restart)}")
        for restart in run.restarts
    ]

    def over_time(name: str, unit: str, value: Callable[[Step], float], *, zero: bool = False) -> str:
        series = [Series(name, list(points(run.steps, lambda step: step.t, value)))]
        return line_chart(f"{name} over time", series, x=_CLOCK, y=Axis(unit, from_zero=zero), spans=spans, width=1100)

    speed = over_time("throughput", "tokens/s", lambda step: step.tokens_per_s, zero=True)
    if not speed:
        speed = over_time("throughput", "steps/s", _steps_per_s, zero=True)
    shaded = " (restarts are shaded)" if spans else ""
    return join(
        (
            chart_card("loss", f"Loss{shaded}", over_time("loss", "cross-entropy, nats per token", lambda s: s.loss)),
            chart_card("speed", f"Throughput{shaded}", speed),
        )
    )


def _steps_per_s(step: Step) -> float:
    return step.count / step.seconds if step.seconds else math.nan


def _restarts(run: RunReport) -> Html:
    if not run.restarts:
        return card("restarts", "Restarts", nothing("none"))
    rows = [(clock(r.t), r.cause, restart_line(r), duration(r.cost_s)) for r in run.restarts]
    return _listed("restarts", "Restarts", rows, ("Time", "Cause", "Then", "Cost"))


def _ledger(run: RunReport) -> Html:
    wall = run.ledger.wall_s or 1.0
    found = sorted(run.ledger.buckets.items(), key=lambda pair: -pair[1])
    rows = [
        (name.replace("_", " "), duration(seconds), join((f"{seconds / wall:.1%}", _bar(seconds / wall))))
        for name, seconds in found
        if seconds >= 0.001 * wall
    ]
    notes = join(nothing(f"Note: {note}") for note in run.ledger.notes)
    title = "Where the time went"
    return card("ledger", title, join((stacked_table(title, ("Bucket", "Time", "Share"), rows), notes)))


def _plan(run: RunReport) -> Html:
    """Plan against actual: what is expected, and by bucket how far the end will be from the plan."""
    if (found := run.forecast) is None:
        return card("plan", "Plan and forecast", nothing(run.plan_problem)) if run.plan_problem else Html("")
    days = {name: seconds / DAY_S for name, seconds in found.beyond_s.items()}
    rows = [(name.replace("_", " "), f"{more:+.2f} days") for name, more in sorted(days.items(), key=lambda d: -d[1])]
    title = "Beyond the plan at the end of the run, by bucket"
    return card("plan", "Plan and forecast", join((facts(told(found)), stacked_table(title, ("Bucket", "More"), rows))))


def _ablations(run: RunReport) -> Html:
    """The studies beside the run, and what they cost."""
    if not run.ablations:
        return Html("")
    rows = [
        (
            each.study, f"{each.done} of {each.cells}", f"{each.gpu_hours:,.2f}", f"{each.preempted_gpu_hours:,.2f}",
            f"{each.recomputed_gpu_hours:,.2f}", f"{each.failed_gpu_hours:,.2f}",
        )
        for each in run.ablations
    ]  # fmt: skip
    columns = ("Study", "Cells done", "GPU-hours", "Preempted", "Recomputed", "Failed")
    return card(
        "ablations",
        "Ablations",
        join((Html(f"<p>{h(run.ablations_line)}</p>"), stacked_table("Ablations", columns, rows))),
    )


def _data(run: RunReport) -> Html:
    """The pipelines that made data for the run, and what they cost."""
    if not run.data:
        return Html("")
    rows = [(each.pipeline, f"{each.done} of {each.tasks}", f"{each.core_hours:,.2f}", f"{each.lost_core_hours:,.2f}")
            for each in run.data]  # fmt: skip
    columns = ("Pipeline", "Tasks done", "Core-hours", "Lost to retries")
    return card("data", "Data", join((Html(f"<p>{h(run.data_line)}</p>"), stacked_table("Data", columns, rows))))


def _bar(share: float) -> Html:
    width = max(1.0, _BAR_WIDTH * min(share, 1.0))
    return Html(
        f'<svg width="{_BAR_WIDTH}" height="10" aria-hidden="true">'
        f'<rect class="bar" width="{width:.0f}" height="10"/></svg>'
    )


def _checkpoints(run: RunReport) -> Html:
    if not run.checkpoints:
        return card("checkpoints", "Checkpoints", nothing("none that the launcher has seen"))
    return _listed("checkpoints", "Checkpoints", [(step, clock(t)) for t, step in run.checkpoints], ("Step", "Durable"))


def _evaluations(run: RunReport) -> Html:
    scored = [(line, scores_of(line)) for line in run.evaluations]
    names = sorted({name for _, scores in scored for name in scores})[:8]
    if not names:
        return Html("")
    rows = [
        (line["step"], *(f"{scores[name]:.4g}" if name in scores else "–" for name in names)) for line, scores in scored
    ]
    return _listed("evaluations", "Evaluations", rows, ("Step", *names))


def _experts(run: RunReport) -> Html:
    """A row for each layer with experts; the bars are its experts in their order."""
    if (found := run.experts) is None:
        return Html("")
    rows = [
        (
            one.layer, f"{one.fullest} ({max(one.relative):.2f} x mean)", f"{one.emptiest} ({min(one.relative):.2f})",
            one.starved, _profile(one.relative),
        )
        for one in found.layers
    ]  # fmt: skip
    title = f"Loads of experts, {found.span}"
    columns = ("Layer", "Fullest expert", "Emptiest", f"Below {STARVED:.0%}", "All experts")
    return card("experts", title, stacked_table(title, columns, rows))


def _profile(values: Sequence[float]) -> Html:
    """A bar for each of the ``values``, in their order; the highest fills the row."""
    highest, width = max(*values, 1e-9), max(1, _PROFILE_WIDTH // len(values))
    bars = "".join(
        f"M{width * at} {_ROW}h{width}v-{_ROW * value / highest:.1f}h-{width}z" for at, value in enumerate(values)
    )
    return Html(
        f'<svg width="{width * len(values)}" height="{_ROW}" aria-hidden="true"><path class="bar" d="{bars}"/></svg>'
    )


def _listed(id: str, title: str, rows: Sequence[Sequence[object]], columns: Sequence[str]) -> Html:
    """A table of the newest rows; nothing without any."""
    if not rows:
        return Html("")
    left = len(rows) - MAX_ROWS
    more = nothing(f"+{left} earlier") if left > 0 else Html("")
    return card(id, title, join((more, stacked_table(title, columns, rows[-MAX_ROWS:]))))


def series_of(
    runs: Sequence[RunReport], x: Callable[[RunReport, Step], float], y: Callable[[Step], float]
) -> Iterator[Series]:
    """A line for each run."""
    for run in runs:
        yield Series(run.run, list(points(run.steps, partial(x, run), y)))


def plan_page(plan: Plan, name: str) -> str:
    """The page of the plan of ``name``."""
    shown = [
        ("GPUs", f"{plan.gpus:,} {plan.gpu.upper()}"),
        ("days", f"{plan.days:.1f}"),
        ("MFU", f"{plan.mfu(plan.best):.1%}"),
        ("GPU-hours", f"{plan.gpu_hours:,.0f}"),
        ("tokens", count(plan.tokens)),
    ]
    tables = [
        card(f"part{number}", title, stacked_table(title, ("", ""), rows))
        for number, (title, rows) in enumerate(sections(plan))
    ]
    return page(f"{name}: plan", join((Html(f"<h1>{h(name)}: plan</h1>"), facts(shown))), [
        *tables[:2], _curve(plan), *tables[2:], _figures(plan)
    ])  # fmt: skip


def speed_chart(plan: Plan, width: int = 1100) -> str:
    """Speed over the number of GPUs, beside one that grows with it, as SVG."""
    first = plan.curve[0]
    predicted = Series("predicted", [(float(p.gpus), p.tokens_per_s) for p in plan.curve])
    ideal = Series("in proportion", [(float(p.gpus), first.tokens_per_s / first.gpus * p.gpus) for p in plan.curve])
    y = Axis("tokens/s", from_zero=True)
    return line_chart("speed over GPUs", [predicted, ideal], x=Axis("GPUs"), y=y, width=width)


def _curve(plan: Plan) -> Html:
    waiting = [
        Series("communication", [(float(p.gpus), 100 * p.communication) for p in plan.curve]),
        Series("pipeline bubble", [(float(p.gpus), 100 * p.bubble) for p in plan.curve]),
    ]
    days = Series("days", [(float(p.gpus), plan.tokens / p.tokens_per_s / DAY_S) for p in plan.curve])
    x = Axis("GPUs")
    charts = (
        speed_chart(plan),
        line_chart("days of training over GPUs", [days], x=x, y=Axis("days", from_zero=True), width=1100),
        line_chart("waiting over GPUs", waiting, x=x, y=Axis("% of a step", from_zero=True), width=1100),
    )
    names = ("Speed over GPUs", "Days of training over GPUs", "What GPUs wait for")
    return join(
        chart_card(f"curve{at}", name, chart) for at, (name, chart) in enumerate(zip(names, charts, strict=True))
    )


def _figures(plan: Plan) -> Html:
    rows = [
        (name, f"{figure.value:.4g} {figure.unit}", "yes" if figure.measured else "", source_of(figure))
        for name, figure in plan.figures().items()
    ]
    title = "What this is made from"
    return card("figures", title, stacked_table(title, ("Figure", "Value", "Measured here", "Source"), rows))


# Two runs beside each other, as text and as a page. Pure.


_COLUMN = 28


def compare_text(first: RunReport, second: RunReport, price: Price) -> list[str]:
    """The runs as columns, and where their losses part."""
    rows = [("", first.run, second.run), *_rows(first, second, price)]
    lines = [f"{name:<12}{_cut(a):<{_COLUMN + 2}}{_cut(b)}".rstrip() for name, a, b in rows]
    return [*lines, "", losses_part(first, second)]


def compare_page(first: RunReport, second: RunReport, price: Price) -> str:
    """The page, with their lines in the same charts."""
    runs = (first, second)
    width, step = 1100, Axis("step")
    loss = line_chart(
        "loss", list(series_of(runs, lambda _, s: s.step, lambda s: s.loss)),
        x=step, y=Axis("cross-entropy, nats per token"), width=width,
    )  # fmt: skip
    later = line_chart(
        "loss over time", list(series_of(runs, lambda run, s: s.t - run.began, lambda s: s.loss)),
        x=Axis("since the start", "duration"), y=Axis("cross-entropy, nats per token"), width=width,
    )  # fmt: skip
    speed = line_chart(
        "throughput", list(series_of(runs, lambda _, s: s.step, lambda s: s.tokens_per_s)),
        x=step, y=Axis("tokens/s", from_zero=True), width=width,
    )  # fmt: skip
    title = f"{first.run} and {second.run}"
    parts = [
        card("facts", "Side by side", stacked_table("Side by side", ("", first.run, second.run), _rows(*runs, price))),
        chart_card("loss", "Loss by step", loss),
        chart_card("time", "Loss by time", later),
        chart_card("speed", "Throughput by step", speed),
    ]
    return page(title, Html(f"<h1>{h(title)}</h1><p>{h(losses_part(*runs))}</p>"), parts)


def losses_part(first: RunReport, second: RunReport) -> str:
    """Up to which step the losses are equal to the last digit, in a sentence."""
    one, other = _losses(first), _losses(second)
    common = sorted(one.keys() & other.keys())
    if not common:
        return "They have no step with a loss in common."
    parted = next((step for step in common if one[step] != other[step]), None)
    if parted is None:
        return f"Their losses are equal to the last digit in all {len(common):,} steps that both have."
    last = common[-1]
    return (
        f"Their losses differ from step {parted} on: {one[parted]:.6g} and {other[parted]:.6g}; "
        f"at step {last} they are {one[last]:.6g} and {other[last]:.6g}."
    )


def _losses(run: RunReport) -> dict[int, float]:
    """The loss of each step, of one that was done twice the later."""
    return {step.step: step.loss for step in run.steps if math.isfinite(step.loss)}


def _rows(first: RunReport, second: RunReport, price: Price) -> Sequence[tuple[str, str, str]]:
    return [
        (name, a, b) for (name, a), (_, b) in zip(_facts(first, price), _facts(second, price), strict=True) if a or b
    ]


def _facts(run: RunReport, price: Price) -> Iterator[tuple[str, str]]:
    losses = _losses(run)
    speeds = sorted(step.tokens_per_s for step in run.steps if math.isfinite(step.tokens_per_s))
    yield "state", run.state
    yield "ranks", f"{run.world_size} on {plural(len(run.nodes), 'node')}"
    yield "steps", f"{run.ledger.steps:,}"
    yield "tokens", "" if run.tokens is None else count(run.tokens)
    yield "last loss", f"{losses[max(losses)]:.6g}" if losses else ""
    yield "tokens/s", f"{count(speeds[len(speeds) // 2])} (median)" if speeds else ""
    yield "wall clock", duration(run.ledger.wall_s)
    yield "ETTR", f"{run.ledger.ettr:.1%}" if run.steps else ""
    yield "restarts", str(len(run.restarts))
    yield "cost", cost_line(run, price)


def _cut(text: str) -> str:
    return text if len(text) <= _COLUMN else f"{text[: _COLUMN - 1]}…"
