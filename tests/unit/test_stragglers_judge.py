"""The judge of slow ranks on planted causes, and what must hold for any step times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.stragglers.judge import judge, one_f_one_b
from opsd.stragglers.trace import (
    BACKWARD,
    COMPUTE,
    DATA,
    FORWARD,
    GPU,
    HOST_PAUSES,
    SLOW_DATA,
    SLOW_GPU,
    SLOW_HOST,
    SLOW_LINK,
    SLOW_WORKER,
    STEP,
    TRANSFER,
    Place,
    Slowdown,
    Trace,
)

STEPS = 8


def made(seed: int, ranks: int, *, per_node: int = 4, noise: float = 0.01, steps: int = STEPS, pp: int = 1) -> Trace:
    """A healthy job of ``ranks``, a second of forward and two of backward computing a step."""
    draw = random.Random(seed)
    places = {
        rank: Place(f"n{rank // per_node}", rank % per_node, dp=rank // pp, pp=rank % pp) for rank in range(ranks)
    }
    rows = {
        phase: {rank: [seconds * draw.lognormvariate(0, noise) for _ in range(steps)] for rank in places}
        for phase, seconds in ((FORWARD, 1.0), (BACKWARD, 2.0))
    }
    return Trace(places, range(steps), rows)


def slowed(trace: Trace, factor: float, *ranks: int) -> Trace:
    """The same with the work of ``ranks`` longer by ``factor``."""
    rows = {
        phase: {rank: [factor * s for s in row] if rank in ranks else row for rank, row in by_rank.items()}
        for phase, by_rank in trace.seconds.items()
    }
    return Trace(trace.places, trace.steps, rows, trace.microbatches)


def also(trace: Trace, **phases: dict[int, list[float]]) -> Trace:
    """The same with more phases."""
    return Trace(trace.places, trace.steps, {**trace.seconds, **phases}, trace.microbatches)


def flat(trace: Trace, seconds: float, **others: float) -> dict[int, list[float]]:
    """The same seconds for all ranks but ``r<RANK>=``."""
    return {rank: [others.get(f"r{rank}", seconds)] * len(trace.steps) for rank in trace.places}


def only(verdicts: tuple[Slowdown, ...]) -> Slowdown:
    """The first of the verdicts, which must exist."""
    assert verdicts
    return verdicts[0]


seeds = st.integers(0, 2**32)


@given(seeds, st.integers(2, 40))
def test_a_healthy_job(seed: int, ranks: int) -> None:
    """With one percent of noise nothing is found."""
    assert judge(made(seed, ranks)) == ()


@given(seeds, st.integers(2, 40), st.floats(1.15, 5.0), st.data())
def test_a_slow_rank_is_named_with_its_cost(seed: int, ranks: int, factor: float, data: st.DataObject) -> None:
    """One slow rank is named, with its node and GPU, and the slowdown that it causes."""
    slow = data.draw(st.integers(0, ranks - 1))
    verdict = only(judge(slowed(made(seed, ranks), factor, slow)))
    place = made(seed, ranks).places[slow]
    assert (verdict.cause, verdict.culprits) == (SLOW_WORKER, (slow,))
    assert (verdict.nodes, verdict.gpus) == ((place.node,), (place.gpu,))
    assert verdict.slowdown == pytest.approx(factor, rel=0.08)


@given(seeds, st.integers(3, 12), st.floats(1.15, 3.0), st.data())
def test_a_slow_node_is_named_whole(seed: int, nodes: int, factor: float, data: st.DataObject) -> None:
    """If all ranks of a node are slow, all are culprits and only that node is named."""
    node = data.draw(st.integers(0, nodes - 1))
    ranks = tuple(range(4 * node, 4 * node + 4))
    verdict = only(judge(slowed(made(seed, 4 * nodes), factor, *ranks)))
    assert (verdict.culprits, verdict.nodes) == (ranks, (f"n{node}",))


@given(seeds, st.floats(1e-4, 1e4), st.floats(1.2, 3.0))
def test_units_do_not_matter(seed: int, unit: float, factor: float) -> None:
    """Times in another unit lead to the same verdict."""
    trace = slowed(made(seed, 12), factor, 5)
    scaled = slowed(trace, unit, *trace.places)
    assert only(judge(scaled)).culprits == only(judge(trace)).culprits
    assert only(judge(scaled)).slowdown == pytest.approx(only(judge(trace)).slowdown)


@given(seeds, st.permutations(range(12)))
def test_numbers_of_ranks_do_not_matter(seed: int, order: list[int]) -> None:
    """Renumbered ranks are judged alike."""
    trace = slowed(made(seed, 12), 1.5, 5)
    renamed = Trace(
        {order[rank]: place for rank, place in trace.places.items()},
        trace.steps,
        {phase: {order[rank]: row for rank, row in rows.items()} for phase, rows in trace.seconds.items()},
    )
    assert only(judge(renamed)).culprits == (order[5],)


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6), st.integers(1, 20))
def test_bounds_of_a_pipeline(work: list[float], microbatches: int) -> None:
    """A step takes at least as long as its busiest stage, and at most as long as all stages one after the other."""
    seconds = one_f_one_b(work, [2 * s for s in work], microbatches)
    assert 3 * max(work) * 0.999 <= seconds <= 3 * sum(work) * 1.001


@given(st.integers(1, 8), st.integers(1, 40), st.floats(0.1, 10.0))
def test_an_even_pipeline(stages: int, microbatches: int, each: float) -> None:
    """Of equal stages a step takes (micro-batches + stages - 1) passes in both directions."""
    work = [each * microbatches] * stages
    assert one_f_one_b(work, work, microbatches) == pytest.approx(2 * each * (microbatches + stages - 1))


def test_the_same_slow_rank_by_cuda_events() -> None:
    """If the GPU's own times differ it is the GPU, and the evidence says how it was measured."""
    trace = made(1, 8)
    verdict = only(judge(also(trace, **{GPU: flat(trace, 2.5, r3=3.0)})))
    assert (verdict.cause, verdict.culprits, verdict.source) == (SLOW_GPU, (3,), "gpu")
    assert "CUDA events" in verdict.evidence[-1]


def test_a_slow_host() -> None:
    """If the GPU keeps up and the host's times differ, the host is slow."""
    trace = slowed(made(1, 8), 1.4, 3)
    verdict = only(judge(also(trace, **{GPU: flat(trace, 2.5)})))
    assert (verdict.cause, verdict.culprits) == (SLOW_HOST, (3,))


def test_waiting_that_hides_in_the_backward_pass() -> None:
    """Where gradients are reduced in it, all work equally long, and the long forward pass tells who is slow."""
    trace = made(1, 8)
    forward = {rank: [s * (1.6 if rank == 5 else 1.0) for s in row] for rank, row in trace.seconds[FORWARD].items()}
    backward = {rank: [3.6 - s for s in row] for rank, row in forward.items()}
    hidden = also(trace, **{FORWARD: forward, BACKWARD: backward, STEP: flat(trace, 4.0)})
    verdict = only(judge(hidden))
    assert (verdict.cause, verdict.culprits) == (SLOW_WORKER, (5,))
    assert verdict.slowdown == pytest.approx(4.0 / 3.4, rel=0.03)


def test_slow_data() -> None:
    """A rank that waits for its data."""
    trace = made(1, 8)
    verdict = only(judge(also(trace, **{DATA: flat(trace, 0.01, r6=0.9), STEP: flat(trace, 4.0)})))
    assert (verdict.cause, verdict.culprits) == (SLOW_DATA, (6,))
    assert verdict.slowdown == pytest.approx(4.0 / (4.0 - 0.89), rel=0.02)


def test_a_slow_link() -> None:
    """A rank whose transfers take longer, without the waiting for others."""
    trace = made(1, 16)
    verdict = only(judge(also(trace, **{TRANSFER: flat(trace, 0.2, r9=0.8)})))
    assert (verdict.cause, verdict.culprits) == (SLOW_LINK, (9,))


def test_pauses_of_the_host() -> None:
    """Single long forward passes, now here, now there: Python's garbage collection, for instance."""
    trace, draw = made(1, 16, steps=20), random.Random(2)
    forward = {
        rank: [s + (1.5 if draw.random() < 0.15 else 0.0) for s in row] for rank, row in trace.seconds[FORWARD].items()
    }
    verdict = only(judge(also(trace, **{FORWARD: forward})))
    assert (verdict.cause, verdict.culprits) == (HOST_PAUSES, ())


def test_ranks_that_differ_by_nature() -> None:
    """If a third of the nodes takes longer, nobody is a culprit."""
    trace = slowed(made(1, 24), 1.5, *range(8))
    assert not any(verdict.culprits for verdict in judge(trace))


def test_the_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    """A last stage with more work has no slow rank, and a slow rank in it is still found."""
    last = [rank for rank in range(32) if rank % 4 == 3]
    trace = slowed(made(1, 32, pp=4), 1.5, *last)
    assert not any(verdict.culprits for verdict in judge(trace))
    assert {verdict.culprits for verdict in judge(slowed(trace, 1.4, 7))} == {(7,), ()}


def test_work_that_is_not_divided_into_passes() -> None:
    """The time of computing as a whole will do."""
    trace = made(1, 8)
    whole = Trace(trace.places, trace.steps, {COMPUTE: flat(trace, 1.0, r2=1.3)})
    assert only(judge(whole)).culprits == (2,)


def test_too_little_to_judge() -> None:
    """Four steps, or one rank."""
    assert judge(slowed(made(1, 8, steps=4), 3.0, 1)) == ()
    assert judge(made(1, 1)) == ()
