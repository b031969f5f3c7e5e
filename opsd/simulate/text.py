"""Studies as people read them: lines for the terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from opsd.simulate.account import BUCKETS, TOLD
from opsd.simulate.faults import DAY_S, SparesNeeded
from opsd.simulate.study import Study, knee
from opsd.words import count, duration, plural

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
