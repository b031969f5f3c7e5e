"""A plan as text, for the terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opsd.plan.forecast import DAY_S
from opsd.plan.hardware import Figure
from opsd.plan.memory import GIB
from opsd.plan.plan import ABLATIONS, Plan, checkpoint_bytes
from opsd.plan.search import Point, peak
from opsd.plan.source import SOURCES
from opsd.trainer import counts
from opsd.words import count, duration, plural, spans

_TOLD: Final = {
    "products": "products that are too small", "attention": "attention", "states": "layers with a state",
    "elementwise": "elementwise operations",
    "recomputation": "recomputation", "loop": "gaps between kernels", "tensor": "tensor parallelism's communication",
    "sharding": "FSDP's communication", "context": "context parallelism's communication",
    "experts": "the exchange with experts", "pipeline": "the pipeline's communication",
    "bubble": "the pipeline's bubble", "optimizer": "the optimizer", "stragglers": "stragglers",
}  # fmt: skip
SHOWN = 5
"""Layouts on the page; ``--json`` has more."""


def plan_text(plan: Plan) -> Iterator[str]:
    """The page."""
    for title, rows in sections(plan):
        yield title
        wide = max((len(name) for name, _ in rows), default=0)
        yield from (f"  {name:<{wide}}  {text}" for name, text in rows)
        yield ""
    yield "Every number and its source: --json -; what is measured here takes its place: --measured PATH"


def sections(plan: Plan) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Headings, each with its rows of a name and a text."""
    yield "Run", _run(plan)
    yield "Time and cost", _time(plan)
    if measured := _measured(plan):
        yield "Measured on this cluster", measured
    yield f"Layouts, fastest first ({plan.gpus} {plan.gpu.upper()})", _layouts(plan)
    yield "Memory of a GPU", _memory(plan)
    yield "A step", _step(plan)
    yield "Above the time of training", _overheads(plan)
    yield "More or fewer GPUs", _curve(plan)
    yield "Suggested by scaling laws", _suggested(plan)


def _run(plan: Plan) -> list[tuple[str, str]]:
    model, data = plan.config.model, plan.config.data
    total, active = counts.parameters(model), counts.active_parameters(model)
    return [
        ("parameters", count(total) + (f", of which a token meets {count(active)}" if active < total else "")),
        (
            "tokens",
            f"{count(plan.tokens)}, {count(data.batch * data.sequence)} a step ({data.batch} x {data.sequence})",
        ),
        ("compute", f"{plan.tokens * plan.flops_per_token:.3g} FLOP, {plan.flops_per_token / 1e9:.2f} GFLOP a token"),
    ]


def _time(plan: Plan) -> list[tuple[str, str]]:
    kept, node = plan.reliability, int(plan.hardware.node_gpus.value)
    training = plan.training_s / DAY_S
    money = f", {plan.gpu_hours * plan.price:,.0f} {plan.currency}" if plan.price else ""
    spares = " and ".join(f"{number} for {share}" for share, number in kept.spares.items())
    in_days = plan.days >= 1
    days, of_training = spans(plan.days, training) if in_days else map(duration, (plan.days * DAY_S, plan.training_s))
    return [
        ("GPUs", f"{plan.gpus:,} on {plural(-(-plan.gpus // node), 'node')}, spares to be complete: {spares}"),
        ("days" if in_days else "time", f"{days}: {of_training} of training; such runs budget {_range(plan.budget)}"),
        ("speed", f"{plan.tokens_per_s / plan.gpus:,.0f} tokens/s per GPU, MFU {plan.mfu(plan.best):.1%}"),
        ("cost", f"{plan.gpu_hours:,.0f} GPU-hours{money}, {plan.kwh:,.0f} kWh"),
        ("ablations", f"{plan.gpu_hours * ABLATIONS.value:,.0f} GPU-hours more ({ABLATIONS.source})"),
        ("checkpoints", f"{checkpoint_bytes(plan.config) / 1e9:,.1f} GB every {duration(kept.interval_s)} (Daly), "
                        f"on disk after {duration(kept.write_s)}"),
        ("failures", f"{kept.failures:.1f} expected, one every {duration(kept.mttf_s)}; ETTR {kept.ettr:.2%}"),
    ]  # fmt: skip


def _measured(plan: Plan) -> list[tuple[str, str]]:
    return [
        (name, f"{figure.value:.4g} {figure.unit}: {source_of(figure)}")
        for name, figure in plan.figures().items() if figure.measured
    ]  # fmt: skip


def _layouts(plan: Plan) -> list[tuple[str, str]]:
    rows = [
        (
            each.layout.name(plan.gpus),
            f"{each.step.total:.3g} s, MFU {plan.mfu(each):.1%}, {each.memory.total / GIB:.1f} GiB",
        )
        for each in plan.found.fitting[:SHOWN]
    ]
    reasons = list(plan.found.reasons.items())
    rows.append(("NVLink", _nvlink(plan)))
    return rows + [(f"{plural(number, 'layout')} out", reason) for reason, number in reasons[:SHOWN]]


def _nvlink(plan: Plan) -> str:
    """Whether what tensor and expert parallelism exchange in each layer stays in an NVLink domain."""
    layout, domain = plan.best.layout, int(plan.hardware.nvlink_gpus.value)
    group, spread = layout.tp * layout.ep, f"TP {layout.tp} x EP {layout.ep}"
    if group <= domain:
        return f"{spread} is {group} of the {domain} GPUs of a domain"
    return f"{spread} is {group} GPUs, a domain has {domain}: experts also exchange over the network"


def _memory(plan: Plan) -> list[tuple[str, str]]:
    memory, most = plan.best.memory, plan.hardware.memory.value
    parts = [(name, f"{value / GIB:8.2f} GiB") for name, value in memory.parts.items()]
    kinds = ", ".join(f"{kind} {value / GIB:.2f}" for kind, value in plan.activations.items())
    latent = plan.config.model.kv_rank and plan.best.layout.tp > 1
    unsure = [("not sure", "activations of latent attention are predicted 9 % too high with TP")] if latent else []
    return [
        *parts,
        ("total", f"{memory.total / GIB:8.2f} of {most / GIB:.1f} GiB"),
        ("recompute", f"activations would take {kinds} GiB"),
        *unsure,
    ]


def _step(plan: Plan) -> list[tuple[str, str]]:
    step = plan.best.step
    parts = [(name, f"{seconds / step.total:6.1%}") for name, seconds in step.parts.items() if seconds]
    unsure = [("not sure", "the time of layers with a state was not measured on a GPU")] if step.states else []
    return [*parts, ("total", duration(step.total)), *unsure]


def _overheads(plan: Plan) -> list[tuple[str, str]]:
    kept, habits, days = plan.reliability, plan.habits, plan.days_by_name
    reasons = {
        "failures": f"{kept.failures:.1f}, each with half an interval of {duration(kept.interval_s)} to do again",
        "restarts": f"{duration(habits.restart.value)} after each of them",
        "checkpoints": f"{duration(habits.stall.value)} every {duration(kept.interval_s)}",
        "maintenance": f"{kept.maintenance:.1f} planned interruptions of {duration(habits.restart.value)}",
        "slow_days": source_of(habits.slow),
        "data": source_of(habits.data),
        "evaluation": source_of(habits.evaluation),
    }
    rows = [(name, _share(share, days[name], plan.days) + reasons[name]) for name, share in kept.overheads.items()]
    training = plan.training_s / DAY_S
    rest = [budget / training - plan.days / training for budget in plan.budget]
    budget = _range(plan.budget) + (" days" if plan.budget[1] >= 1 else "")
    unnamed = f"what no formula has: such runs are budgeted with {budget}"
    return [
        *((name.replace("_", " "), text) for name, text in rows),
        ("sum", _share(sum(kept.overheads.values()), sum(days.values()), plan.days).rstrip()),
        ("allowance", f"{max(0.0, rest[0]):.0%} to {max(0.0, rest[1]):.0%} more, {unnamed}"),
    ]


def _share(share: float, days: float, whole: float) -> str:
    return f"{share:6.2%} " + (f"{days:6.2f} days  " if whole >= 1 else f"{duration(days * DAY_S):>11}  ")


def _range(days: tuple[float, float]) -> str:
    """In whole days if there are ten, or else more exactly."""
    low, high = (f"{each:.0f}" for each in days) if days[1] >= 10 else spans(*days)
    return f"{low} to {high}"


def _curve(plan: Plan) -> list[tuple[str, str]]:
    def line(point: Point) -> tuple[str, str]:
        lost = sum(point.lost(plan.curve[0]).values())
        days = plan.tokens / point.tokens_per_s / DAY_S
        return f"{point.gpus:,}", (
            f"{days:8.1f} days of training, {1 - lost:6.1%} of the speed in proportion, "
            f"{point.communication:5.1%} communication, {point.bubble:5.1%} bubble"
        )

    if len(plan.curve) == 1:
        return [line(plan.curve[0])]
    top = peak(plan.curve)
    why = "are slower" if top.slower else f"run in no layout with data.batch {plan.config.data.batch}"
    return [*map(line, plan.curve), ("peak", f"more than {top.gpus:,} {why}; most is lost to {_TOLD[top.blame]}")]


def _suggested(plan: Plan) -> list[tuple[str, str]]:
    found, data = plan.suggestion, plan.config.data
    (few, many), (low, high) = found.batch, found.rate
    return [
        ("batch", f"{count(few)} to {count(many)} tokens; the run has {count(data.batch * data.sequence)}"),
        ("learning rate", f"{low:.2g} to {high:.2g}; the run has {plan.config.optimizer.lr:.2g}"),
        *(("from", source) for source in SOURCES),
    ]


def source_of(figure: Figure) -> str:
    """The source of a figure; for a measurement of this cluster also the file and its date."""
    return f"{figure.source} ({figure.file}, {figure.date})" if figure.measured else figure.source
