"""Many draws of one setup: means, and how sure they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, quantiles
from typing import Any

from opsd.checkpoints.interval import daly
from opsd.simulate.account import BUCKETS
from opsd.simulate.faults import DAY_S, FaultSource, SimulatedFault
from opsd.simulate.job import Policy
from opsd.simulate.play import Play, Played, Setup

RESAMPLES = 2000
KNEE = 0.0005
"""Of the ETTR: the knee is the least number of spares whose ETTR is within this of the best."""


@dataclass(frozen=True, slots=True)
class Study:
    """The runs of one policy, one for each draw of faults."""

    policy: Policy
    setup: Setup
    runs: Sequence[Played]

    @property
    def ettr(self) -> float:
        """The mean over the draws."""
        return fmean(run.ettr for run in self.runs)

    @property
    def ettr_range(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean, by bootstrap over the draws."""
        return _interval([run.ettr for run in self.runs])

    def gain_over(self, other: Study) -> tuple[float, float, float]:
        """The mean difference in ETTR to ``other`` on the same draws, and its 95 % confidence interval.

        It is narrower than those of both: a draw that is bad for one policy is bad for the others.
        """
        gains = [mine.ettr - theirs.ettr for mine, theirs in zip(self.runs, other.runs, strict=True)]
        return fmean(gains), *_interval(gains)

    def mean(self, name: str) -> float:
        """The mean of a field of ``Played`` over the draws."""
        return fmean(getattr(run, name) for run in self.runs)

    @property
    def buckets(self) -> Mapping[str, float]:
        """Seconds by bucket, means over the draws; they sum to the wall clock."""
        return {name: fmean(run.buckets[name] for run in self.runs) for name in BUCKETS}

    @property
    def swap_hops(self) -> tuple[float, float] | None:
        """Mean hops to the other nodes over all swaps, of the node that went and of the one that came, if known."""
        swaps = [hops for run in self.runs for hops in run.hops]
        return (fmean(before for before, _ in swaps), fmean(after for _, after in swaps)) if swaps else None

    @property
    def gpu_hours_lost(self) -> Mapping[str, float]:
        """By kind of fault, means over the draws, the most expensive first."""
        kinds = {kind for run in self.runs for kind in run.gpu_hours_lost}
        lost = {kind: fmean(run.gpu_hours_lost.get(kind, 0.0) for run in self.runs) for kind in kinds}
        return dict(sorted(lost.items(), key=lambda item: (-item[1], item[0])))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        low, high = self.ettr_range
        setup = self.setup
        node_days = (setup.nodes + setup.spares) * setup.seconds / DAY_S
        return {
            "policy": self.policy.name,
            "nodes": setup.nodes,
            "spares": setup.spares,
            "draws": len(self.runs),
            "ettr": self.ettr,
            "ettr_low": low,
            "ettr_high": high,
            "ettr_worst": min(run.ettr for run in self.runs),
            "wall_s": setup.seconds,
            "buckets": dict(self.buckets),
            "checkpoint_interval_s": setup.interval_s,
            "outages_per_1000_node_days": self.mean("outages") / node_days * 1000,
            "spares_in_use_p50": fmean(run.spares_in_use[0] for run in self.runs),
            "spares_in_use_p99": fmean(run.spares_in_use[1] for run in self.runs),
            "interruptions": self.mean("interruptions"),
            "swaps": self.mean("swaps"),
            "swap_hops": self.swap_hops,
            "requeues": self.mean("requeues"),
            "resubmissions": self.mean("resubmissions"),
            "drains_refused": self.mean("drains_refused"),
            "corruptions_kept": self.mean("corruptions_kept"),
            "longest_standstill_s": max(run.longest_standstill_s for run in self.runs),
            "gpu_hours_lost": dict(self.gpu_hours_lost),
        }


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean, 95 %, by bootstrap."""
    if len(values) < 2:
        return values[0], values[0]
    random = Random(0)
    means = [fmean(random.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    cuts = quantiles(means, n=40, method="inclusive")
    return cuts[0], cuts[-1]


class Draws:
    """The same faults for every policy and number of spares."""

    def __init__(self, source: FaultSource, nodes: int, seconds: float, seeds: Sequence[int]) -> None:
        self._faults = [source.draw(nodes, seconds, seed) for seed in seeds]

    def play(self, policy: Policy, setup: Setup) -> Study:
        size = setup.nodes + setup.spares
        return Study(policy, setup, [Play(policy, setup).run(_within(faults, size)) for faults in self._faults])


def _within(faults: Sequence[SimulatedFault], size: int) -> list[SimulatedFault]:
    return [fault for fault in faults if fault.node < size]


def best_interval_s(source: FaultSource, nodes: int, stall_s: float) -> float:
    """The checkpoint interval by Daly's formula, from the rate at which nodes of the run fail."""
    return daly(stall_s, DAY_S / (source.per_node_day * nodes))


def sweep(draws: Draws, policies: Sequence[Policy], setup: Setup, spares: Sequence[int]) -> list[Study]:
    """The study of each number of spares, with the policy at the same place."""
    return [
        draws.play(policy, replace(setup, spares=count)) for policy, count in zip(policies, spares, strict=True)
    ]  # fmt: skip


def knee(studies: Sequence[Study]) -> int:
    """The least number of spares from which on more of them hardly help."""
    best = max(study.ettr for study in studies)
    return min(study.setup.spares for study in studies if study.ettr >= best - KNEE)
