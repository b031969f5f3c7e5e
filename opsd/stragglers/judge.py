"""Names who or what makes a job slow, what it costs, and how sure that is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median

from opsd.stragglers.outliers import SLOW, Outlier, outliers, spread
from opsd.stragglers.trace import (
    BACKWARD,
    DATA,
    FORWARD,
    GPU,
    SLOW_DATA,
    SLOW_GPU,
    SLOW_HOST,
    SLOW_LINK,
    SLOW_WORKER,
    STEP,
    TRANSFER,
    Rows,
    Trace,
    Verdict,
    middles,
)
from opsd.stragglers.uneven import lengths, stages
from opsd.stragglers.verdicts import Candidate, alone, named, verdict_of
from opsd.stragglers.what_if import WhatIf

LEAST_STEPS = 5
EQUAL = 0.05
"""The share by which the work of ranks may differ that wait for each other within it."""
COSTLY = 0.03
"""Smaller shares of the step are not reported."""


def judge(trace: Trace, *, uneven: bool = True) -> tuple[Verdict, ...]:
    """What slows the job down, the costliest first; empty if all is well or there are too few steps or ranks.

    Slow ranks are named even if they cost nothing at present because others take longer still. Without ``uneven``
    work that is not the same for all is not looked for, which takes the most time.
    """
    if len(trace.steps) < LEAST_STEPS or len(trace.places) < 2:
        return ()
    found = [one for one in _candidates(trace, uneven=uneven) if one.alone - 1 >= COSTLY or one.verdict.culprits]
    found.sort(key=lambda one: one.alone, reverse=True)
    others = (replace(one.verdict, slowdown=max(1.0, one.alone)) for one in found[1:])
    return (found[0].verdict, *others) if found else ()


def _candidates(trace: Trace, *, uneven: bool) -> Iterator[Candidate]:
    slow = outliers(trace, trace.work())
    what_if = WhatIf(trace) if slow or uneven else None
    if slow and what_if is not None:
        yield alone(_worker(trace, slow, what_if))
    elif trace.source == GPU and (late := outliers(trace, trace.host_work())):
        yield alone(_on_host(trace, late))
    elif trace.source != GPU and (hidden := _hidden(trace)):
        yield alone(hidden)
    if uneven and what_if is not None:
        left = what_if.without(rank for outlier in slow for rank in outlier.ranks)
        found = (stages(trace, left), lengths(trace, left))
        yield from (candidate for candidate in found if candidate is not None)
    for phase, cause in ((DATA, SLOW_DATA), (TRANSFER, SLOW_LINK)):
        verdict = _waiting(trace, phase, cause)
        if verdict is not None:
            yield alone(verdict)


def _worker(trace: Trace, slow: Sequence[Outlier], what_if: WhatIf) -> Verdict:
    ranks = sorted({rank for outlier in slow for rank in outlier.ranks})
    better = what_if.without(ranks)
    steps, work = len(trace.steps), trace.work()
    cause = SLOW_GPU if trace.source == GPU else SLOW_WORKER
    told = [
        f"{named(trace, o.ranks)} works {median(_flat(work, o.ranks)):.3g} s a step, {o.excess:.0%} longer than the "
        f"median of its peers, in {steps} steps ({o.sigmas:.0f} standard deviations)"
        for o in slow
    ]
    sure = 0.5 if min(o.peers for o in slow) < 2 else min(0.95, 0.7 + 0.025 * min(o.sigmas for o in slow))
    return verdict_of(trace, cause, ranks, what_if.slowdown(better.forward, better.backward), sure, told)


def _on_host(trace: Trace, slow: Sequence[Outlier]) -> Verdict:
    """The GPU keeps up with its peers and the step does not: the time is lost between them."""
    ranks = sorted({rank for outlier in slow for rank in outlier.ranks})
    host = trace.host_work()
    peers = [rank for rank in trace.places if rank not in ranks]
    extra = max(fmean(host[rank]) for rank in ranks) - fmean(middles(host, peers))
    told = [f"{named(trace, o.ranks)} is {o.excess:.0%} slower by the host's clock, and not by the GPU's" for o in slow]
    return verdict_of(trace, SLOW_HOST, ranks, _relieved(trace, extra), 0.8, told)


def _hidden(trace: Trace) -> Verdict | None:
    """A rank whose forward pass takes longer and whose backward pass is as much shorter.

    Where gradients are reduced within the backward pass, its peers wait for it there, and all work equally long.
    """
    forward, backward = trace.rows(FORWARD), trace.rows(BACKWARD)
    if forward is None or backward is None:
        return None
    work, found = trace.work(), outliers(trace, forward)
    for group in trace.groups():
        whole, reverse = median(middles(work, group)), median(middles(backward, group))
        for rank in (rank for outlier in found for rank in outlier.ranks if rank in group):
            if abs(median(work[rank]) - whole) > EQUAL * whole or median(backward[rank]) >= reverse:
                return None
    if not found:
        return None
    ranks = sorted({rank for outlier in found for rank in outlier.ranks})
    peers = [rank for rank in trace.places if rank not in ranks]
    extra = max(median(forward[rank]) for rank in ranks) - median(middles(forward, peers))
    told = [
        f"the forward pass of {named(trace, o.ranks)} takes {o.excess:.0%} longer, and its backward pass is shorter by "
        "what the others wait for it in theirs"
        for o in found
    ]
    return verdict_of(trace, SLOW_WORKER, ranks, _relieved(trace, extra), 0.75, told)


def _waiting(trace: Trace, phase: str, cause: str) -> Verdict | None:
    """Ranks that spend more time than their peers in a phase in which they do not compute."""
    rows = trace.rows(phase)
    if rows is None:
        return None
    length = _step_seconds(trace)
    typical = {rank: median(row) for rank, row in rows.items()}
    usual = median(typical.values())
    noise = max(spread(list(typical.values())), 0.01 * length)
    slow = sorted(r for r, s in typical.items() if s - usual > max(SLOW * length, 4 * noise))
    slow = [r for r in slow if sum(s - usual > SLOW / 2 * length for s in rows[r]) >= 0.8 * len(rows[r])]
    if not slow or 4 * len(slow) > max(4, len(typical)):
        return None
    told = [
        f"{named(trace, slow)} spends {max(typical[r] for r in slow):.3g} s of a step on it, the median {usual:.3g} s"
    ]
    return verdict_of(trace, cause, slow, _relieved(trace, max(typical[r] for r in slow) - usual), 0.8, told)


def _step_seconds(trace: Trace) -> float:
    """The usual duration of a step, at least the longest work."""
    whole = trace.rows(STEP)
    rows = whole if whole is not None else trace.work()
    longest = [max(values) for values in zip(*(rows[rank] for rank in trace.places), strict=True)]
    return float(median(longest))


def _relieved(trace: Trace, extra_s: float) -> float:
    """The slowdown by ``extra_s`` in each step."""
    length = _step_seconds(trace)
    return length / max(length - extra_s, 0.01 * length) if trace.rows(STEP) is not None else 1 + extra_s / length


def _flat(rows: Rows, ranks: Iterable[int]) -> list[float]:
    return [seconds for rank in ranks for seconds in rows[rank]]
