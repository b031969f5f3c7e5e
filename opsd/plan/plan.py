"""The plan of a run: layout, time, GPUs, spares and cost. Pure; every assumption names its source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from opsd.plan.forecast import DAY_S, Habits, Planned, Reliability, reliability
from opsd.plan.hardware import Figure, Hardware
from opsd.plan.layout import RECOMPUTE, Layout, Recompute, problem
from opsd.plan.memory import GIB, memory_of, state_values
from opsd.plan.search import Candidate, CannotPlan, Point, Search, curve, fastest, peak, search, step_time
from opsd.plan.source import SOURCES, Suggestion, suggest
from opsd.trainer import counts
from opsd.trainer.config import Config

ABLATIONS: Final = Figure(
    161_280 / 276_480,
    "of the run's GPU-hours",
    "SmolLM3: 161,280 for ablations and debugging beside 276,480",
)
ALLOWANCE: Final = (1.2, 1.3)
"""Wall clock over the time of training that such runs are budgeted with (SmolLM training playbook)."""
_NEAR: Final = 16
"""A deadline is looked for up to so many times the GPUs that it takes at the full rate of their products."""
_MOST_GPUS: Final = 100_000
_SHOWN: Final = 20
_MOST_LOST: Final = 0.95
"""Share of the wall clock; a run that loses more has no plan (see ``opsd.plan.forecast.Planned``)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run on ``gpus`` GPUs of the kind ``gpu``. Times in seconds."""

    config: Config
    gpu: str
    gpus: int
    tokens: float
    hardware: Hardware
    habits: Habits
    found: Search
    curve: tuple[Point, ...]
    price: float = 0.0
    currency: str = "USD"

    @property
    def best(self) -> Candidate:
        """The fastest layout."""
        return self.found.fitting[0]

    @property
    def flops_per_token(self) -> float:
        """As MFU counts them."""
        return counts.flops_per_token(self.config.model, self.config.data.sequence)

    @property
    def tokens_per_s(self) -> float:
        """While training."""
        return tokens_per_s(self.config, self.best)

    def mfu(self, candidate: Candidate) -> float:
        """Of a layout, against the dense peak of the data sheet."""
        rate = tokens_per_s(self.config, candidate) * self.flops_per_token
        return rate / (self.gpus * self.hardware.peak.value)

    @property
    def training_s(self) -> float:
        """Steps alone."""
        return self.tokens / self.tokens_per_s

    @property
    def reliability(self) -> Reliability:
        """Failures, checkpoints and spares."""
        return _reliability(self.config, self.training_s, self.gpus, self.hardware, self.habits)

    @property
    def days(self) -> float:
        """Wall clock, all overheads included."""
        return self.training_s / DAY_S / (1 - sum(self.reliability.overheads.values()))

    @property
    def gpu_hours(self) -> float:
        """Of the run, without spares."""
        return self.gpus * self.days * 24

    @property
    def kwh(self) -> float:
        """At the maximum of the nodes, without cooling."""
        return self.gpu_hours / self.hardware.node_gpus.value * self.hardware.node_power.value / 1000

    @property
    def suggestion(self) -> Suggestion:
        """Batch and learning rate of published laws."""
        return suggest(self.config.model, self.tokens)

    @property
    def activations(self) -> dict[Recompute, float]:
        """Bytes of the fastest layout's activations by what is computed again, whether it fits or not."""
        layout = self.best.layout
        variants = {kind: replace(layout, recompute=kind) for kind in RECOMPUTE}
        return {kind: memory_of(self.config, each, self.gpus).activations for kind, each in variants.items()}

    @property
    def days_by_name(self) -> dict[str, float]:
        """What the overheads add to the days of training."""
        return {name: share * self.days for name, share in self.reliability.overheads.items()}

    @property
    def budget(self) -> tuple[float, float]:
        """Days that such runs are budgeted with; what is above ``days`` has no name."""
        return self.training_s / DAY_S * ALLOWANCE[0], self.training_s / DAY_S * ALLOWANCE[1]

    def figures(self) -> dict[str, Figure]:
        """Everything that was assumed or measured, by name."""
        return self.hardware.figures() | self.habits.figures() | {"ablations": ABLATIONS}


def tokens_per_s(config: Config, candidate: Candidate) -> float:
    """While training in a layout."""
    return config.data.batch * config.data.sequence / candidate.step.total


def checkpoint_bytes(config: Config) -> int:
    """Parameters and moments, in float32."""
    return 4 * state_values(config)


def plan_for_gpus(config: Config, gpu: str, gpus: int, tokens: float, hardware: Hardware, habits: Habits) -> Plan:
    """The plan on ``gpus`` GPUs. Raises CannotPlan."""
    if gpus > _MOST_GPUS:
        raise CannotPlan(f"{gpus:,} GPUs are more than the {_MOST_GPUS:,} that a plan is made for")
    found = search(config, gpus, hardware)
    points = tuple(curve(config, gpus, hardware))
    return _with_time(Plan(config, gpu, gpus, tokens, hardware, habits, found, points))


def plan_as_is(config: Config, gpu: str, gpus: int, tokens: float, hardware: Hardware, habits: Habits) -> Plan:
    """The plan of the layout that ``config`` has, on ``gpus`` GPUs alone. Raises CannotPlan."""
    layout = Layout.of(config)
    if why := problem(config, layout, gpus):
        raise CannotPlan(f"the layout of the run cannot be planned: {why}")
    found = Candidate(layout, memory_of(config, layout, gpus), step_time(config, layout, gpus, hardware))
    only = Point(gpus, tokens_per_s(config, found), found.step)
    return _with_time(Plan(config, gpu, gpus, tokens, hardware, habits, Search((found,), ()), (only,)))


def _with_time(plan: Plan) -> Plan:
    """``plan``, if it leaves time for training. Raises CannotPlan."""
    lost = plan.reliability.overheads
    if sum(lost.values()) > _MOST_LOST:
        most = max(lost, key=lambda name: lost[name]).replace("_", " ")
        raise CannotPlan(
            f"such a run loses more than {_MOST_LOST:.0%} of its time, most to {most}: take fewer GPUs, or check the "
            "figures of --assume and --measured"
        )
    return plan


def plan_for_days(config: Config, gpu: str, days: float, tokens: float, hardware: Hardware, habits: Habits) -> Plan:
    """The plan on the fewest whole nodes that are done within ``days``. Raises CannotPlan if none are."""
    node = int(hardware.node_gpus.value)
    flops = tokens * counts.flops_per_token(config.model, config.data.sequence)
    least = max(1, math.floor(flops / (hardware.peak.value * hardware.gemm.value * days * DAY_S) / node))
    near: tuple[float, int] | None = None
    for nodes in _counts(least, min(_NEAR * least + 1, _MOST_GPUS // node)):
        if (best := fastest(config, nodes * node, hardware)) is None:
            continue
        training = tokens / tokens_per_s(config, best)
        share = sum(_reliability(config, training, nodes * node, hardware, habits).overheads.values())
        took = training / DAY_S / (1 - share)
        if took <= days:
            return plan_for_gpus(config, gpu, nodes * node, tokens, hardware, habits)
        near = min(near or (took, nodes * node), (took, nodes * node))
    if near is None:
        raise CannotPlan(
            f"{days:g} days take at least {least * node:,} GPUs, and no layout runs on so many: "
            "allow more days, or a larger data.batch"
        )
    raise CannotPlan(
        f"{days:g} days are too few: the fastest that was found takes {near[0]:.1f} days on {near[1]:,} GPUs; "
        "allow more days, or a larger data.batch"
    )


def _counts(least: int, most: int) -> Iterator[int]:
    """Numbers of nodes: every one while they are few, then in steps of about 3 %."""
    nodes = least
    while nodes <= most:
        yield nodes
        nodes += max(1, nodes // 32)


def _reliability(config: Config, training_s: float, gpus: int, hardware: Hardware, habits: Habits) -> Reliability:
    return reliability(training_s, checkpoint_bytes(config), gpus, int(hardware.node_gpus.value), habits)


def planned(plan: Plan, made: float) -> Planned:
    """What a run's folder keeps of ``plan``, made at the epoch second ``made``."""
    kept, habits = plan.reliability, plan.habits
    return Planned(
        made=made, gpus=plan.gpus, nodes=math.ceil(plan.gpus / plan.hardware.node_gpus.value), tokens=plan.tokens,
        days=plan.days, training_days=plan.training_s / DAY_S, mttf_s=kept.mttf_s, overheads=kept.overheads,
        spares=kept.spares["99%"], outages=habits.outages.value, repair_s=habits.repair.value,
        clumps=habits.clumps.value,
    )  # fmt: skip


def as_dict(plan: Plan) -> dict[str, Any]:
    """For ``--json``; the keys are part of the interface (docs/planning.md)."""
    config, best, kept = plan.config, plan.best, plan.reliability
    suggestion = plan.suggestion
    return {
        "parameters": counts.parameters(config.model),
        "active_parameters": counts.active_parameters(config.model),
        "tokens": plan.tokens,
        "flops_per_token": plan.flops_per_token,
        "flops": plan.tokens * plan.flops_per_token,
        "gpu": plan.gpu,
        "gpus": plan.gpus,
        "nodes": math.ceil(plan.gpus / plan.hardware.node_gpus.value),
        "days": plan.days,
        "training_days": plan.training_s / DAY_S,
        "gpu_hours": plan.gpu_hours,
        "ablation_gpu_hours": plan.gpu_hours * ABLATIONS.value,
        "cost": {"total": plan.gpu_hours * plan.price, "gpu_hour": plan.price, "currency": plan.currency}
        if plan.price else None,
        "kwh": plan.kwh,
        "mfu": plan.mfu(best),
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s / plan.gpus,
        "step_s": best.step.total,
        "step": best.step.parts,
        "memory_gib": {name: value / GIB for name, value in best.memory.parts.items()},
        "activations_gib": {name: value / GIB for name, value in plan.activations.items()},
        "memory_total_gib": best.memory.total / GIB,
        "memory_available_gib": plan.hardware.memory.value / GIB,
        "layout": layout_dict(best.layout, plan.gpus),
        "nvlink": {"gpus": int(plan.hardware.nvlink_gpus.value), "group": best.layout.tp * best.layout.ep},
        "layouts": [_candidate_dict(plan, each) for each in plan.found.fitting[:_SHOWN]],
        "out": [{"layout": layout_dict(each.layout, plan.gpus), "reason": each.reason} for each in plan.found.out],
        "checkpoint_bytes": checkpoint_bytes(config),
        "checkpoint_interval_s": kept.interval_s,
        "checkpoint_write_s": kept.write_s,
        "mttf_s": kept.mttf_s,
        "failures": kept.failures,
        "spares": kept.spares,
        "ettr": kept.ettr,
        "overheads": kept.overheads,
        "overhead_days": plan.days_by_name,
        "budget_days": plan.budget,
        "curve": [_point_dict(plan, point) for point in plan.curve],
        "peak": asdict(peak(plan.curve)) if len(plan.curve) > 1 else None,
        "suggested": {"batch_tokens": suggestion.batch, "lr": suggestion.rate, "sources": SOURCES},
        "figures": {name: figure._asdict() for name, figure in plan.figures().items()},
    }  # fmt: skip


def _point_dict(plan: Plan, point: Point) -> dict[str, Any]:
    lost = point.lost(plan.curve[0])
    return {
        "gpus": point.gpus, "tokens_per_s": point.tokens_per_s, "days": plan.tokens / point.tokens_per_s / DAY_S,
        "communication": point.communication, "bubble": point.bubble,
        "of_proportional": 1 - sum(lost.values()), "lost": lost,
    }  # fmt: skip


def layout_dict(layout: Layout, gpus: int) -> dict[str, Any]:
    """The degrees by name; ``dp`` is the number of parts of the global batch."""
    return {"dp": layout.groups(gpus), **layout.spread(), "micro_batch": layout.micro_batch}


def _candidate_dict(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": layout_dict(candidate.layout, plan.gpus), "step_s": candidate.step.total,
        "tokens_per_s": tokens_per_s(plan.config, candidate), "mfu": plan.mfu(candidate),
        "memory_gib": candidate.memory.total / GIB,
        "memory_parts_gib": {name: value / GIB for name, value in candidate.memory.parts.items()},
    }  # fmt: skip
