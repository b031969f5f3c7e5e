"""What failures, checkpoints and everything else that is no training cost a run, and how many spares it needs. Pure.

Rates and times are figures that name their source, so that those of this cluster can take their place.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from opsd.checkpoints.interval import daly
from opsd.plan.figures import Figure, Figures

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
