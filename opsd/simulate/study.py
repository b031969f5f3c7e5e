"""Draws of simulated runs, and what they come to, as text and figures.

Many draws of one setup: means, and how sure they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, quantiles
from typing import Any, Final

from opsd.charts import Axis, Series, line_chart, standalone
from opsd.checkpoints.interval import daly
from opsd.simulate.account import BUCKETS, TOLD, Bucket
from opsd.simulate.faults import DAY_S, FaultSource, SimulatedFault, SparesNeeded
from opsd.simulate.job import Policy
from opsd.simulate.play import Play, Played, Setup
from opsd.words import count, duration, plural

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


# Studies as people read them: lines for the terminal, and charts as SVG. Pure.


SOURCES = (
    "Times of detection, swap and requeue: docs/benchmarks.md, a tiny model on three nodes. What your own program "
    "needs to start comes on top: --program-s."
)


def study_lines(study: Study, source: str) -> list[str]:
    """One policy: its ETTR and where the rest of the time goes."""
    setup, (low, high) = study.setup, study.ettr_range
    seconds = setup.seconds
    lines = [
        f"{setup.nodes} nodes and {setup.spares} spares for {seconds / DAY_S:g} days, {study.policy.told}",
        f"faults: {source}, {plural(len(study.runs), 'draw')}; a checkpoint every {duration(setup.interval_s)}",
        "",
        f"ETTR {study.ettr:.2%}, 95 % interval of the mean {low:.2%} to {high:.2%}, worst draw "
        f"{min(run.ettr for run in study.runs):.2%}",
    ]
    for bucket in BUCKETS:
        spent = study.buckets[bucket]
        lines.append(f"  {bucket:<12} {spent / seconds:>8.3%} {duration(spent):>12}  {TOLD[bucket]}")
    lines += [
        "",
        f"outages {study.mean('outages'):,.1f}, swaps {study.mean('swaps'):,.1f}, "
        f"requeues {study.mean('requeues'):,.1f}, resubmitted by a person {study.mean('resubmissions'):,.1f}, "
        f"drains refused by the budget {study.mean('drains_refused'):,.1f}",
        f"longest standstill {duration(max(run.longest_standstill_s for run in study.runs))}",
    ]
    if hops := study.swap_hops:
        lines.append(f"a node that came was {hops[1]:.2f} hops from the others, the one that went {hops[0]:.2f}")
    if kept := study.mean("corruptions_kept"):
        older = f"older than the {plural(setup.keep, 'kept checkpoint')}"
        lines.append(f"corruptions {older}, so that they stay in the model: {kept:,.1f}")
    lost = [f"{kind} {count(hours)}" for kind, hours in list(study.gpu_hours_lost.items())[:5] if hours >= 1]
    return [*lines, f"GPU-hours lost by kind of fault: {', '.join(lost) or 'less than one'}", SOURCES]


def needed_line(needed: SparesNeeded, nodes: int) -> str:
    """How many spares a job needs, by repairs alone."""
    return (
        f"all {nodes} nodes are there 99 % of the time with {needed.mean} spares on the average of the draws, with "
        f"{needed.p95} in 95 % of them"
    )


def compare_lines(studies: Sequence[Study], source: str) -> list[str]:
    """Policies beside each other, on the same faults."""
    setup = studies[0].setup
    first = studies[0]
    gain = f"over {first.policy.name}"
    head = (
        f"{'policy':<10}{'ETTR':>8}{'95 % interval':>18}{gain:>15}{'95 % interval':>20}{'lost work':>11}"
        f"{'restarts':>10}{'waiting':>9}{'person':>8}"
    )
    lines = [
        f"{setup.nodes} nodes and {setup.spares} spares for {setup.seconds / DAY_S:g} days; faults: {source}, "
        f"the same {plural(len(studies[0].runs), 'draw')} for all",
        "",
        head,
    ]
    for study in studies:
        low, high = study.ettr_range
        more, least, most = study.gain_over(first)
        gained = f"{more:>+15.2%}{f'{least:+.2%} to {most:+.2%}':>20}" if study is not first else " " * 35
        shares = {name: spent / setup.seconds for name, spent in study.buckets.items()}
        restarts = shares["detection"] + shares["restart"] + shares["queue"]
        lines.append(
            f"{study.policy.name:<10}{study.ettr:>8.2%}{f'{low:.2%} to {high:.2%}':>18}{gained}"
            f"{shares['lost_work']:>11.2%}{restarts:>10.2%}{shares['waiting']:>9.2%}{shares['person']:>8.2%}"
        )
    return [*lines, "", *(f"{study.policy.name}: {study.policy.told}" for study in studies), SOURCES]


def sweep_lines(studies: Sequence[Study], source: str) -> list[str]:
    """One policy with several numbers of spares."""
    setup = studies[0].setup
    lines = [
        f"{setup.nodes} nodes for {setup.seconds / DAY_S:g} days, policy {studies[0].policy.name}; faults: {source}, "
        f"the same {plural(len(studies[0].runs), 'draw')} for all",
        "",
        f"{'spares':>6}{'ETTR':>9}{'waiting':>10}",
    ]
    for study in studies:
        waiting = study.buckets["waiting"] / setup.seconds
        lines.append(f"{study.setup.spares:>6}{study.ettr:>9.2%}{waiting:>10.2%}")
    return [*lines, "", f"from {plural(knee(studies), 'spare')} on more of them hardly help", SOURCES]


_LOST: Final[Mapping[str, Sequence[Bucket]]] = {
    "lost work": ("lost_work",), "restarts": ("detection", "restart", "queue"), "waiting": ("waiting",),
    "person": ("person",), "checkpoints": ("checkpoint",), "slower": ("fewer_nodes", "slow_nodes"),
}  # fmt: skip
_LEFT, _RIGHT, _TOP, _ROW, _WIDTH = 80, 190, 40, 34, 720
_BAR: Final = 16


def sweep_chart(studies: Sequence[Study]) -> str:
    """The ETTR over the number of spares."""
    values = ([study.ettr for study in studies], *zip(*(study.ettr_range for study in studies), strict=True))
    spares = [float(study.setup.spares) for study in studies]
    points = [[(x, 100 * y) for x, y in zip(spares, each, strict=True)] for each in values]
    series = [Series(name, each) for name, each in zip(("mean", "low", "high"), points, strict=True)]
    svg = line_chart("ETTR over spares", series, x=Axis("spares"), y=Axis("ETTR in percent"))
    return standalone(svg)


def compare_chart(studies: Sequence[Study]) -> str:
    """A bar for each policy: the share of the wall clock that it loses, by cause, with the interval of the mean."""
    most = max(1 - study.ettr_range[0] for study in studies) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _TOP + _ROW * len(studies) + 8
    rows = "".join(_row(study, _TOP + _ROW * at, scale) for at, study in enumerate(studies))
    told = "; ".join(f"{study.policy.name} {1 - study.ettr:.2%}" for study in studies)
    return standalone(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="Share of the wall clock lost: {told}">{"".join(_legend())}{rows}</svg>'
    )


def _legend() -> Iterator[str]:
    at = float(_LEFT)
    for number, name in enumerate(_LOST):
        yield f'<rect class="dot s{number}" x="{at:.0f}" y="8" width="10" height="10"/>'
        yield f'<text x="{at + 14:.0f}" y="17">{name}</text>'
        at += 28 + 7.2 * len(name)


def _row(study: Study, top: float, scale: float) -> str:
    parts, at = [f'<text x="{_LEFT - 8}" y="{top + 12}" text-anchor="end">{study.policy.name}</text>'], float(_LEFT)
    for number, buckets in enumerate(_LOST.values()):
        wide = sum(study.buckets[bucket] for bucket in buckets) / study.setup.seconds * scale
        parts.append(f'<rect class="dot s{number}" x="{at:.1f}" y="{top}" width="{wide:.1f}" height="{_BAR}"/>')
        at += wide
    low, high = (_LEFT + (1 - ettr) * scale for ettr in reversed(study.ettr_range))
    middle, (worst, best) = top + _BAR / 2, study.ettr_range
    parts.append(f'<path class="axis" fill="none" d="M{low:.1f} {middle - 4}v8m0 -4H{high:.1f}m0 -4v8"/>')
    text = f"ETTR {study.ettr:.2%} ({worst:.2%} to {best:.2%})"
    return "".join([*parts, f'<text x="{max(at, high) + 8:.0f}" y="{top + 12}">{text}</text>'])
