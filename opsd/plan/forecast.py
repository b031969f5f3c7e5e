"""How often a run fails and what that costs, and when a run will end by its plan.

What failures, checkpoints and everything else that is no training cost a run, and how many spares it needs. Pure.

Rates and times are figures that name their source, so that those of this cluster can take their place.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from opsd.checkpoints.interval import daly
from opsd.plan.hardware import Figure, Figures
from opsd.words import duration, spans

DAY_S: Final = 86_400.0
_MOST_SPARES: Final = 20
"""For each node of a job."""


@dataclass(frozen=True, slots=True)
class Habits(Figures):
    """How often a cluster fails and how long everything around the training takes."""

    failures: Figure
    outages: Figure
    repair: Figure
    clumps: Figure
    restart: Figure
    stall: Figure
    maintenance: Figure
    slow: Figure
    data: Figure
    evaluation: Figure
    write: Figure


HABITS: Final = Habits(
    failures=Figure(419 / 54 / 16_384, "1/GPU/day", "419 unexpected ones in 54 days on 16,384 H100 (arXiv 2407.21783)"),
    outages=Figure(4.16e-3, "1/node/day", "a trace of 400 nodes of 8 GPUs (stepfun-ai/InfiniteHBD-Trace, days 0-200)"),
    repair=Figure(180 * 3600.0, "s", "mean of the same trace; half of all repairs end within 35 h"),
    clumps=Figure(3.0, "shape", "fitted to the same trace: 48 nodes need 7 spares for 99 %; for every 400 nodes"),
    restart=Figure(120.0, "s", "allowance for NCCL, loading and compiling; opsd's own part is 2 s (benchmarks)"),
    stall=Figure(1.0, "s", "the copy to shared memory that training waits for; 2 GB take 0.22 s (benchmarks)"),
    maintenance=Figure(47 / 54 / 16_384, "1/GPU/day", "47 planned interruptions beside them (arXiv 2407.21783)"),
    slow=Figure(0.015, "share", "throughput varies by 1 to 2 % over a day (arXiv 2407.21783)"),
    data=Figure(0.0, "share", "read ahead from local NVMe; `opsd ledger` has what a run waited"),
    evaluation=Figure(0.0, "share", "checkpoints are evaluated elsewhere, on spares or in jobs of their own"),
    write=Figure(1.1e9, "bytes/s per node", "Lustre of the SmolLM training playbook, the slowest of its stores"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reliability:
    """Shares of the wall clock by name, and what follows. Times in seconds."""

    mttf_s: float
    interval_s: float
    write_s: float
    overheads: dict[str, float]
    failures: float
    maintenance: float
    """Planned interruptions; ``failures`` are the others."""
    ettr: float
    spares: dict[str, int]


def reliability(training_s: float, checkpoint: float, gpus: int, node_gpus: int, habits: Habits) -> Reliability:
    """Of a run that trains for ``training_s`` on ``gpus`` GPUs, with checkpoints of ``checkpoint`` bytes.

    A checkpoint is begun when the last one is on disk, so that its interval is no shorter than the writing.
    """
    nodes = math.ceil(gpus / node_gpus)
    mttf = DAY_S / (gpus * habits.failures.value)
    write = checkpoint / (nodes * habits.write.value)
    interval = max(daly(habits.stall.value, mttf), write)
    restart = habits.restart.value
    extra = {  # seconds for each second of training
        "failures": interval / 2 / mttf,
        "restarts": restart / mttf,
        "checkpoints": habits.stall.value / interval,
        "maintenance": gpus * habits.maintenance.value / DAY_S * restart,
        "slow_days": habits.slow.value,
        "data": habits.data.value,
        "evaluation": habits.evaluation.value,
    }
    wall = 1 + sum(extra.values())
    lost = sum(extra[name] for name in ("failures", "restarts", "checkpoints", "maintenance"))
    return Reliability(
        mttf_s=mttf, interval_s=interval, write_s=write,
        overheads={name: value / wall for name, value in extra.items()},
        failures=training_s * wall / mttf,
        maintenance=training_s * wall * gpus * habits.maintenance.value / DAY_S, ettr=1 / (1 + lost),
        spares={f"{share:.1%}".replace(".0", ""): spares_for(nodes, share, habits) for share in (0.99, 0.999)},
    )  # fmt: skip


def spares_for(nodes: int, share: float, habits: Habits) -> int:
    """Spares with which a job on ``nodes`` nodes has all of them for ``share`` of the time."""
    most = 8
    while most < _MOST_SPARES * nodes and up_share(nodes, most, habits) < share:
        most *= 2
    return bisect_left(range(most), True, key=lambda spares: up_share(nodes, spares, habits) >= share)


def up_share(nodes: int, spares: int, habits: Habits) -> float:
    """The share of the time in which a job on ``nodes`` nodes has all of them, with ``spares`` spares that fail alike.

    Nodes that are away come in clumps, since some repairs take weeks: their number is negative binomial.
    """
    away = habits.outages.value * habits.repair.value / DAY_S
    return _at_most(spares, (nodes + spares) * away / (1 + away), habits.clumps.value * max(1.0, nodes / 400))


def _at_most(most: int, mean: float, shape: float) -> float:
    """The negative binomial distribution up to ``most``."""
    log, log_rest = math.log(shape / (shape + mean)), math.log(mean / (shape + mean))
    return math.fsum(
        math.exp(math.lgamma(k + shape) - math.lgamma(shape) - math.lgamma(k + 1) + shape * log + k * log_rest)
        for k in range(most + 1)
    )


# A run against its plan: when it will end, with what share of the time for training, and what is to blame. Pure.
#
# The plan of a run is ``plan.json`` in its folder. Its seconds are those of the buckets of the ledger. What is left
# is expected to go as the run has gone, and as the plan has it in so far as little of the run has been seen yet: the
# plan weighs as much as the time in which it expects one failure.


TOLERANCE: Final = 0.1
"""Of the plan's days, by which a forecast may exceed them."""
_PLANNED: Final[Mapping[str, tuple[str, ...]]] = {
    "recomputed": ("failures",), "restart": ("restarts", "maintenance"), "checkpoint_stall": ("checkpoints",),
    "data_stall": ("data",), "other": ("evaluation",),
}  # fmt: skip
"""The buckets of the ledger that a plan has expected, by the names of its overheads."""
_ONCE: Final = ("setup", "queued", "stop")
"""Buckets whose past says nothing of the future."""
_MOST_OVERHEAD, _MOST_AWAY = 0.95, 0.5
"""A plan in which more of the time is lost, or of the nodes are away, is none."""
PRODUCTIVE: Final = "productive"


class BadPlan(ValueError):
    """What is in a run's ``plan.json`` is no plan; the message is one sentence."""


class Planned(BaseModel):
    """What ``plan.json`` keeps of a plan. ``made`` is an epoch second, rates are those of the plan's figures."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="ignore")

    made: float
    gpus: int = Field(gt=0, le=1_000_000)
    nodes: int = Field(gt=0, le=20_000)
    tokens: float = Field(gt=0, le=1e18)
    days: float = Field(gt=0, le=36_500)
    training_days: float = Field(gt=0, le=36_500)
    mttf_s: float = Field(gt=0, le=1e12)
    overheads: dict[str, Annotated[float, Field(ge=0)]] = Field(max_length=32)
    spares: int = Field(ge=0, le=20_000)
    outages: float = Field(ge=1e-12, le=1)
    repair_s: float = Field(ge=1, le=365 * DAY_S)
    clumps: float = Field(ge=1e-3, le=100)

    @model_validator(mode="after")
    def _leaves_time(self) -> Self:
        if sum(self.overheads.values()) > _MOST_OVERHEAD:
            raise ValueError("overheads leave no time for training")
        if self.outages * self.repair_s > _MOST_AWAY * DAY_S:
            raise ValueError("outages and repair_s leave too few nodes")
        return self

    @property
    def gpu_hours(self) -> float:
        """Of the whole run."""
        return self.gpus * self.days * 24

    @classmethod
    def parse(cls, text: str) -> Planned:
        """Raises BadPlan."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "all of it"
            raise BadPlan(f"plan.json: {where}: {first['msg']}; write it again with opsd plan --run FOLDER") from error


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: seconds by bucket of its ledger, tokens trained on, nodes that it has lost.

    ``earlier_tokens`` were trained on before the ledger begins; ``gpus`` are those it has now, 0 if that is not known.
    """

    buckets: Mapping[str, float]
    tokens: float
    lost_nodes: int = 0
    earlier_tokens: float = 0.0
    gpus: int = 0

    @property
    def wall_s(self) -> float:
        """From the start until now."""
        return sum(self.buckets.values())


@dataclass(frozen=True, slots=True)
class Forecast:
    """How a run is expected to end. ``beyond_s`` are seconds more than planned, by bucket; below 0 less."""

    planned: Planned
    progress: Progress
    left_s: float
    ettr: float
    beyond_s: Mapping[str, float]

    @property
    def days(self) -> float:
        """Of the run as far as its ledger has it."""
        return (self.progress.wall_s + self.left_s) / DAY_S

    @property
    def planned_days(self) -> float:
        """Of the plan, for the tokens that were left when the ledger began."""
        return self.planned.days * (1 - self.progress.earlier_tokens / self.planned.tokens)

    @property
    def excess(self) -> float:
        """Of ``days`` over the plan's, as a share; below 0 the run is faster."""
        return self.days / self.planned_days - 1

    @property
    def planned_ettr(self) -> float:
        """The share of the wall clock that the plan has for steps."""
        return 1 - sum(self.planned.overheads.get(name, 0.0) for names in _PLANNED.values() for name in names)

    @property
    def blame(self) -> str:
        """The bucket that exceeds the plan most, productive for slow steps; "" as long as the forecast keeps to it."""
        return max(self.beyond_s, key=lambda name: self.beyond_s[name]) if self.excess > TOLERANCE else ""

    def spares(self) -> int:
        """Advised for 99 % of the time: with the plan's rate of outages, corrected by the nodes that were lost."""
        planned, done_days = self.planned, self.progress.wall_s / DAY_S
        outages = (self.progress.lost_nodes + 1) / (planned.nodes * done_days + 1 / planned.outages)
        most = _MOST_AWAY * DAY_S / planned.repair_s
        return _spares(planned.nodes, min(outages, most), planned.repair_s, planned.clumps)


@lru_cache(maxsize=64)
def _spares(nodes: int, outages: float, repair_s: float, clumps: float) -> int:
    figures = HABITS.figures()
    values = {"outages": outages, "repair": repair_s, "clumps": clumps}
    given = {name: figures[name]._replace(value=value) for name, value in values.items()}
    return spares_for(nodes, 0.99, HABITS.given(given))


def forecast(planned: Planned, progress: Progress) -> Forecast | None:
    """How the run will end; None before its first step, and once all tokens are done."""
    productive = progress.buckets.get(PRODUCTIVE, 0.0)
    seen = progress.tokens - progress.earlier_tokens
    if productive <= 0 or seen <= 0 or not progress.tokens < planned.tokens:
        return None
    rest_s = productive / seen * (planned.tokens - progress.tokens)
    of_plan_s = DAY_S * planned.days * (1 - progress.earlier_tokens / planned.tokens)
    planned_s = {
        name: of_plan_s * sum(planned.overheads.get(one, 0.0) for one in names) for name, names in _PLANNED.items()
    }
    training_s = of_plan_s - sum(planned_s.values())
    weight = planned.mttf_s
    expected = {PRODUCTIVE: productive + rest_s}
    for name in (progress.buckets.keys() | planned_s.keys()) - {PRODUCTIVE}:
        seconds = progress.buckets.get(name, 0.0)
        per_second = (seconds + weight * planned_s.get(name, 0.0) / training_s) / (productive + weight)
        expected[name] = seconds + (0.0 if name in _ONCE else per_second * rest_s)
    total = sum(expected.values())
    beyond = {
        name: s - (training_s if name == PRODUCTIVE else planned_s.get(name, 0.0)) for name, s in expected.items()
    }
    return Forecast(planned, progress, total - progress.wall_s, expected[PRODUCTIVE] / total, beyond)


def forecast_dict(found: Forecast) -> dict[str, Any]:
    """For JSON; times in days but for ``beyond_s``."""
    return {
        "days_left": found.left_s / DAY_S, "days": found.days, "planned_days": found.planned_days,
        "excess": found.excess, "ettr": found.ettr, "planned_ettr": found.planned_ettr, "spares": found.spares(),
        "planned_spares": found.planned.spares, "blame": found.blame, "beyond_s": dict(found.beyond_s),
    }  # fmt: skip


def brief(found: Forecast) -> str:
    """The forecast in a few words."""
    late = f", {found.excess:.0%} beyond the plan by {found.blame.replace('_', ' ')}" if found.blame else ""
    return f"{found.left_s / DAY_S:.1f} days left, ETTR {found.ettr:.1%}, {found.spares()} spares advised{late}"


def told(found: Forecast) -> list[tuple[str, str]]:
    """The forecast in words, as names with a text."""
    planned, left = found.planned, found.left_s / DAY_S
    lines = [
        ("days left", "{} of {} expected; {} were planned".format(*spans(left, found.days, found.planned_days))),
        ("ETTR", f"{found.ettr:.1%} expected at the end; {found.planned_ettr:.1%} planned"),
        ("spares", f"{found.spares()} advised for 99 % of the time; {planned.spares} planned"),
    ]
    if found.progress.gpus not in (0, planned.gpus):
        lines.append(("GPUs", f"{found.progress.gpus:,}, and the plan is of {planned.gpus:,}: see opsd plan --run"))
    if blame := found.blame:
        what = "slower steps" if blame == PRODUCTIVE else blame.replace("_", " ")
        lines.append(
            ("beyond the plan", f"{found.excess:.0%}, most of it by {what}: {duration(found.beyond_s[blame])}")
        )
    return lines
