"""A plan as one HTML file with charts. Pure."""

from __future__ import annotations

from opsd.agent.web.html import Html, card, facts, h, join, stacked_table
from opsd.charts import Axis, Series, line_chart
from opsd.plan.plan import Plan
from opsd.plan.reliability import DAY_S
from opsd.plan.text import sections, source_of
from opsd.report.page import chart_card, page
from opsd.words import count


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
