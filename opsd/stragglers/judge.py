"""Names who or what makes a job slow, what it costs, and how sure that is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import correlation, fmean, median

from opsd.stragglers.trace import (
    BACKWARD,
    DATA,
    FORWARD,
    GPU,
    HOST_PAUSES,
    LENGTHS,
    SLOW,
    SLOW_DATA,
    SLOW_GPU,
    SLOW_HOST,
    SLOW_LINK,
    SLOW_WORKER,
    STAGES,
    STEP,
    TRANSFER,
    Outlier,
    Place,
    Rows,
    Slowdown,
    Trace,
    middles,
    outliers,
    ratios,
    spread,
)

LEAST_STEPS = 5
EQUAL = 0.05
"""The share by which the work of ranks may differ that wait for each other within it."""
COSTLY = 0.03
"""Smaller shares of the step are not reported."""


def judge(trace: Trace, *, uneven: bool = True) -> tuple[Slowdown, ...]:
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


def _worker(trace: Trace, slow: Sequence[Outlier], what_if: WhatIf) -> Slowdown:
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


def _on_host(trace: Trace, slow: Sequence[Outlier]) -> Slowdown:
    """The GPU keeps up with its peers and the step does not: the time is lost between them."""
    ranks = sorted({rank for outlier in slow for rank in outlier.ranks})
    host = trace.host_work()
    peers = [rank for rank in trace.places if rank not in ranks]
    extra = max(fmean(host[rank]) for rank in ranks) - fmean(middles(host, peers))
    told = [f"{named(trace, o.ranks)} is {o.excess:.0%} slower by the host's clock, and not by the GPU's" for o in slow]
    return verdict_of(trace, SLOW_HOST, ranks, _relieved(trace, extra), 0.8, told)


def _hidden(trace: Trace) -> Slowdown | None:
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


def _waiting(trace: Trace, phase: str, cause: str) -> Slowdown | None:
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


ADVICE = {
    SLOW_WORKER: "compare clocks, temperature and power of its GPU, and the load of its host, with those of a peer",
    SLOW_GPU: "look at its clocks, power limit and temperature; swap the node if they are in order",
    SLOW_HOST: "look for other processes on its cores, memory pressure and a wrong CPU binding",
    HOST_PAUSES: "collect Python's garbage at fixed steps on all ranks at once (gc.disable, then gc.collect)",
    SLOW_DATA: "give its loader more workers, or look at the storage that it reads from",
    SLOW_LINK: "run `opsd preflight network` on its nodes",
    STAGES: "move layers away from the slowest stage",
    LENGTHS: "distribute sequences by their cost, not by their number of tokens",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """``alone`` is the slowdown by this cause only; that of the verdict may contain others."""

    verdict: Slowdown
    alone: float


def alone(verdict: Slowdown) -> Candidate:
    """A verdict that contains no other cause."""
    return Candidate(verdict, verdict.slowdown)


def named(trace: Trace, ranks: Sequence[int]) -> str:
    """The ranks in words, with their node if it is known."""
    first = trace.places[ranks[0]]
    where = f" on {first.node}" if first.node else ""
    if len(ranks) == 1:
        return f"rank {ranks[0]}{where}" + (f", GPU {first.gpu}" if first.gpu is not None else "")
    return f"each of {len(ranks)} ranks from {ranks[0]} to {ranks[-1]}{where}"


def verdict_of(
    trace: Trace,
    cause: str,
    ranks: Sequence[int],
    slowdown: float,
    confidence: float,
    told: Sequence[str],
    stage: int | None = None,
) -> Slowdown:
    """The verdict, with the places of its culprits, the source of the times and the advice for its cause."""
    places = [trace.places[rank] for rank in ranks]
    return Slowdown(
        cause=cause,
        culprits=tuple(ranks),
        nodes=tuple(sorted({place.node for place in places if place.node})),
        gpus=tuple(sorted({place.gpu for place in places if place.gpu is not None})),
        slowdown=max(1.0, slowdown),
        confidence=round(confidence, 2),
        evidence=(*told, f"measured by {'CUDA events' if trace.source == GPU else 'the clock of the hosts'}"),
        source=trace.source,
        stage=stage,
        advice=ADVICE[cause],
    )


class WhatIf:
    """The duration of a step if some of the work were different."""

    def __init__(self, trace: Trace, halved: tuple[Rows, Rows] | None = None) -> None:
        self.trace = trace
        self.forward, self.backward = halved if halved is not None else halves(trace)
        self._completion = Completion(trace.places, trace.microbatches)
        self.seconds = fmean(self._completion.seconds(self.forward, self.backward))
        whole = trace.rows(STEP)
        self.rest = max(0.0, fmean(middles(whole, trace.places)) - self.seconds) if whole is not None else 0.0

    def without(self, slow: Iterable[int]) -> WhatIf:
        """With the times of the median of their peers for these ranks."""
        slow = set(slow)
        if not slow:
            return self
        halved: list[dict[int, Sequence[float]]] = [dict(self.forward), dict(self.backward)]
        for group in self.trace.groups():
            peers = [rank for rank in group if rank not in slow]
            for rank in slow.intersection(group) if peers else ():
                for rows in halved:
                    rows[rank] = middles(rows, peers)
        changed = WhatIf(self.trace, (halved[0], halved[1]))
        changed.rest = self.rest
        return changed

    def slowdown(self, forward: Rows, backward: Rows) -> float:
        """By which factor the steps are longer than with this work."""
        better = fmean(self._completion.seconds(forward, backward)) + self.rest
        return (self.seconds + self.rest) / better if better > 0 else 1.0


_FORWARD_SHARE = 1 / 3
"""Of the operations of a step; the backward pass computes two gradients for each product (Kaplan et al., 2020)."""


def halves(trace: Trace) -> tuple[Rows, Rows]:
    """Forward and backward seconds of each rank; what is not told apart is divided by the usual shares."""
    work = trace.work()
    forward, backward = trace.rows(FORWARD), trace.rows(BACKWARD)
    if forward is None or backward is None:
        return (
            {rank: [_FORWARD_SHARE * s for s in row] for rank, row in work.items()},
            {rank: [(1 - _FORWARD_SHARE) * s for s in row] for rank, row in work.items()},
        )
    parts: tuple[dict[int, list[float]], dict[int, list[float]]] = ({}, {})
    for rank, row in work.items():
        shares = [
            f / (f + b) if f + b > 0 else _FORWARD_SHARE for f, b in zip(forward[rank], backward[rank], strict=True)
        ]
        parts[0][rank] = [share * s for share, s in zip(shares, row, strict=True)]
        parts[1][rank] = [(1 - share) * s for share, s in zip(shares, row, strict=True)]
    return parts


class Completion:
    """The duration of a step for given work: all pipelines work side by side, and the slowest decides."""

    def __init__(self, places: Mapping[int, Place], microbatches: int | None) -> None:
        pipelines: dict[tuple[int, int, int], list[int]] = {}
        for rank in sorted(places, key=lambda rank: places[rank].pp):
            place = places[rank]
            pipelines.setdefault((place.dp, place.tp, place.cp), []).append(rank)
        self._pipelines = list(pipelines.values())
        self._microbatches = microbatches

    def seconds(self, forward: Rows, backward: Rows) -> list[float]:
        """Of each step. Without the number of micro-batches the slowest rank decides, as with very many of them."""
        if self._microbatches is None or max(map(len, self._pipelines)) == 1:
            sums = ([f + b for f, b in zip(forward[r], backward[r], strict=True)] for p in self._pipelines for r in p)
            return [max(step) for step in zip(*sums, strict=True)]
        steps = len(next(iter(forward.values())))
        return [
            max(
                one_f_one_b([forward[r][step] for r in ranks], [backward[r][step] for r in ranks], self._microbatches)
                for ranks in self._pipelines
            )
            for step in range(steps)
        ]


def one_f_one_b(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> float:
    """Seconds of a step whose stages work ``forward`` and ``backward`` seconds in total, transfers not counted."""
    stages = len(forward)
    each = [f / microbatches for f in forward], [b / microbatches for b in backward]
    orders = [_order(stages - stage, microbatches) for stage in range(stages)]
    ends = [[[-1.0] * microbatches for _ in range(stages)] for _ in range(2)]
    clock, at = [0.0] * stages, [0] * stages
    left = 2 * stages * microbatches
    while left:
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                way, batch = order[at[stage]]
                ready = _ready(ends, way, stage, batch, stages)
                if ready < 0:
                    break
                clock[stage] = ends[way][stage][batch] = max(clock[stage], ready) + each[way][stage]
                at[stage] += 1
                left -= 1
    return max(clock)


def _ready(ends: Sequence[Sequence[Sequence[float]]], way: int, stage: int, batch: int, stages: int) -> float:
    """When the input of a pass exists, -1.0 if that is not known yet."""
    if way == 0:
        return ends[0][stage - 1][batch] if stage else 0.0
    return ends[1][stage + 1][batch] if stage < stages - 1 else ends[0][stage][batch]


def _order(depth: int, microbatches: int) -> list[tuple[int, int]]:
    """The passes of a stage, 0 forward and 1 backward, each with its micro-batch; ``depth`` stages begin here."""
    warm = min(depth, microbatches)
    order = [(0, batch) for batch in range(warm)]
    for batch in range(microbatches):
        order.append((1, batch))
        if warm + batch < microbatches:
            order.append((0, warm + batch))
    return order
