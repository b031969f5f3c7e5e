"""Work that is not the same for all, though nobody is slow: stages of a pipeline, lengths of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import correlation, fmean, median

from opsd.stragglers.outliers import SLOW, ratios, spread
from opsd.stragglers.trace import BACKWARD, FORWARD, HOST_PAUSES, LENGTHS, STAGES, Rows, Trace, middles
from opsd.stragglers.verdicts import Candidate, verdict_of
from opsd.stragglers.what_if import WhatIf

UNBALANCED = 0.05
TOGETHER, APART = 0.8, 0.5
"""Correlation of forward and backward times above which the input decides, and below which the host does: only the
forward pass waits for Python."""
MOSTLY = 0.6
"""A rank that is the slowest in this share of the uneven steps is no coincidence."""


def stages(trace: Trace, what_if: WhatIf) -> Candidate | None:
    """The stages of a pipeline whose work is not equal, step after step."""
    ranks_of: dict[int, list[int]] = {}
    for rank, place in trace.places.items():
        ranks_of.setdefault(place.pp, []).append(rank)
    if len(ranks_of) < 2:
        return None
    work = {r: [f + b for f, b in zip(what_if.forward[r], what_if.backward[r], strict=True)] for r in trace.places}
    usual = {stage: middles(work, ranks) for stage, ranks in ranks_of.items()}
    typical = {stage: median(row) for stage, row in usual.items()}
    slowest = max(typical, key=lambda stage: typical[stage])
    others = fmean(seconds for stage, seconds in typical.items() if stage != slowest)
    if others <= 0 or typical[slowest] < (1 + UNBALANCED) * fmean(typical.values()):
        return None
    mean = fmean(typical.values())
    scale = {stage: mean / seconds if seconds > 0 else 1.0 for stage, seconds in typical.items()}
    even = [_scaled(rows, trace, scale) for rows in (what_if.forward, what_if.backward)]
    last = "the last stage" if slowest == max(ranks_of) else f"stage {slowest}"
    told = [
        f"{last} of {len(ranks_of)} works {typical[slowest]:.3g} s a step, the others {others:.3g} s on average",
        f"with {1 - mean / typical[slowest]:.0%} less work in it the stages would be even",
    ]
    slowdown = what_if.slowdown(*_even(what_if, [list(trace.places)]))
    return Candidate(verdict_of(trace, STAGES, (), slowdown, 0.9, told, stage=slowest), what_if.slowdown(*even))


def _scaled(rows: Rows, trace: Trace, scale: Mapping[int, float]) -> Rows:
    return {rank: [scale[trace.places[rank].pp] * seconds for seconds in row] for rank, row in rows.items()}


def lengths(trace: Trace, what_if: WhatIf) -> Candidate | None:
    """Work that differs from rank to rank and step to step, in both passes alike, or in the forward pass only."""
    forward, backward = trace.rows(FORWARD), trace.rows(BACKWARD)
    if forward is None or backward is None or max(map(len, trace.groups())) < 2:
        return None
    passes = [_centred(ratios(trace, rows)) for rows in (forward, backward)]
    if min(spread(values) for values in passes) == 0.0 and min(map(max, passes)) < SLOW:
        return None
    together = correlation(*passes) if min(max(p) - min(p) for p in passes) > 0 else 0.0
    if APART <= together < TOGETHER:
        return None
    if _mostly_one(trace, what_if):
        return None
    own = what_if.slowdown(*_even(what_if, trace.groups()))
    if together >= TOGETHER:
        told = [
            "who takes longest changes from step to step, in the forward and the backward pass alike "
            f"(correlation {together:.2f}): some get more work than others",
            f"in the median step the slowest takes {_ahead(trace, what_if):.0%} longer than the mean of its peers",
        ]
        slowdown = what_if.slowdown(*_even(what_if, [list(trace.places)]))
        return Candidate(verdict_of(trace, LENGTHS, (), slowdown, min(0.95, together), told), own)
    if max(passes[0]) < 2 * max(passes[1]):
        return None
    told = [f"single forward passes take longer, not the backward passes (correlation {together:.2f})"]
    return Candidate(verdict_of(trace, HOST_PAUSES, (), own, 0.6, told), own)


def _even(what_if: WhatIf, groups: Sequence[Sequence[int]]) -> tuple[Rows, Rows]:
    """The work if that of each step were spread evenly over the ranks of each group."""

    def spread_out(rows: Rows) -> Rows:
        found: dict[int, list[float]] = {}
        for group in groups:
            mean = [fmean(values) for values in zip(*(rows[rank] for rank in group), strict=True)]
            found.update(dict.fromkeys(group, mean))
        return found

    return spread_out(what_if.forward), spread_out(what_if.backward)


def _ahead(trace: Trace, what_if: WhatIf) -> float:
    group = max(trace.groups(), key=len)
    rows = {r: [f + b for f, b in zip(what_if.forward[r], what_if.backward[r], strict=True)] for r in group}
    return float(
        median(max(values) / fmean(values) - 1 for values in zip(*rows.values(), strict=True) if fmean(values) > 0)
    )


def _mostly_one(trace: Trace, what_if: WhatIf) -> bool:
    """Whether it is one and the same rank that takes longest: one that has become slow, not the luck of the draw."""
    work = {r: [f + b for f, b in zip(what_if.forward[r], what_if.backward[r], strict=True)] for r in trace.places}
    logs = ratios(trace, work)
    times: dict[int, int] = {}
    groups = trace.groups()
    for step in range(len(trace.steps)):
        for group in groups:
            longest = max(group, key=lambda rank: logs[rank][step])
            if logs[longest][step] > SLOW / 2:
                times[longest] = times.get(longest, 0) + 1
    return max(times.values(), default=0) > MOSTLY * sum(times.values())


def _centred(logs: Mapping[int, Sequence[float]]) -> list[float]:
    """What changes from step to step, without what a rank always has."""
    middles_of = {rank: median(row) for rank, row in logs.items()}
    return [log - middles_of[rank] for rank, row in logs.items() for log in row]
