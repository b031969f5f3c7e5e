"""Two runs beside each other, as text and as a page. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from opsd.agent.web.html import Html, card, h, stacked_table
from opsd.charts import Axis, line_chart
from opsd.report.page import chart_card, page, series_of
from opsd.report.run import Price, RunReport, cost_line
from opsd.words import count, duration, plural

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
