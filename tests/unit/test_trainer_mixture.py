"""Mixtures of sources in stages: exact shares, whole epochs, and an order that depends on nothing but the sample."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.trainer.config import MIXTURES
from opsd.trainer.data.mixture import Mixture
from opsd.trainer.data.stages import MAX_BLOCK, MixtureError, Stage, apportion

NAMES = "abcde"


def u64(values: object) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def read(mixture: Mixture, positions: object) -> list[tuple[str, int]]:
    sources, sequences = mixture.locate(u64(positions))
    return [
        (mixture.names[source], sequence) for source, sequence in zip(sources.tolist(), sequences.tolist(), strict=True)
    ]


@st.composite
def weights(draw: st.DrawFn) -> dict[str, float]:
    parts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any))
    shares = apportion(dict(zip(NAMES, parts, strict=False)), 40)
    return {name: share / 40 for name, share in shares.items()}


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    starts = [0, *sorted(draw(st.sets(st.integers(1, 300), max_size=3)))]
    stages = [Stage(start, draw(weights())) for start in starts]
    sizes = {name: draw(st.integers(1, 90)) for name in NAMES}
    return Mixture(stages, sizes, draw(st.integers(0, 2**40)))


@settings(max_examples=60, deadline=None)
@given(mixture=mixtures(), blocks=st.integers(1, 5))
def test_sources_are_read_in_whole_epochs(mixture: Mixture, blocks: int) -> None:
    """At the end of any block, whatever stages came before, no sequence is an epoch ahead of another of its source."""
    stage = mixture.stages[-1]
    seen = Counter(read(mixture, range(stage.start + blocks * sum(stage.shares().values()))))
    for name, size in mixture.sizes.items():
        counts = [seen[name, sequence] for sequence in range(size)]
        assert max(counts) - min(counts) <= 1


@settings(max_examples=60, deadline=None)
@given(mixture=mixtures(), later=st.integers(0, 10**13))
def test_every_block_has_exact_shares(mixture: Mixture, later: int) -> None:
    """A block has of each source exactly its weight, at the start of a stage as after 1e13 samples."""
    stage = mixture.stages[-1]
    size = sum(stage.shares().values())
    assert size <= 40
    begin = stage.start + later // size * size
    counts = Counter(source for source, _ in read(mixture, range(begin, begin + size)))
    assert counts == {name: share for name, share in stage.shares().items() if share}


@settings(max_examples=60, deadline=None)
@given(mixture=mixtures())
def test_a_short_last_block_is_shared_out_fairly(mixture: Mixture) -> None:
    """Whatever the length of a stage, no source is more than one sample off its weight when it ends."""
    ends = [stage.start for stage in mixture.stages[1:]]
    for stage, end in zip(mixture.stages, ends, strict=False):
        counts = Counter(source for source, _ in read(mixture, range(stage.start, end)))
        for name, weight in stage.weights.items():
            assert abs(counts[name] - weight * (end - stage.start)) < 1 + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    mixture=mixtures(),
    start=st.integers(0, 10**13),
    ranks=st.integers(1, 6),
    rows=st.integers(1, 4),
    tensor=st.integers(1, 2),
)
def test_the_layout_does_not_change_the_order(mixture: Mixture, start: int, ranks: int, rows: int, tensor: int) -> None:
    """Data-parallel ranks read alternate micro-batches of one order; ranks of a tensor-parallel group read the same."""
    steps = 3
    alone = read(mixture, range(start, start + steps * ranks * rows))
    for _ in range(tensor):
        parts = [
            read(mixture, [start + (step * ranks + rank) * rows + row for row in range(rows)])
            for step in range(steps)
            for rank in range(ranks)
        ]
        assert [place for part in parts for place in part] == alone


@settings(max_examples=60, deadline=None)
@given(mixture=mixtures(), at=st.integers(0, 400), length=st.integers(1, 50), more=st.integers(0, 60))
def test_skipped_samples_are_left_out(mixture: Mixture, at: int, length: int, more: int) -> None:
    """After a skip the run reads what it would have read later, and nothing before it changes."""
    skipping = Mixture(mixture.stages, mixture.sizes, 7, [(at, length), (at + more, 5)])
    plain = Mixture(mixture.stages, mixture.sizes, 7)
    full_mask = read(plain, range(at + length + more + 105))
    del full_mask[at : at + length]
    del full_mask[at + more : at + more + 5]
    assert read(skipping, range(at + more + 100)) == full_mask


@settings(max_examples=60, deadline=None)
@given(mixture=mixtures(), position=st.integers(0, 400), at=st.integers(0, 400), length=st.integers(1, 50))
def test_what_each_source_has_given_is_known_without_reading(
    mixture: Mixture, position: int, at: int, length: int
) -> None:
    """Less than a block off at any place, exact where a block ends, and skipped samples count."""
    skipping = Mixture(mixture.stages, mixture.sizes, 7, [(at, length)])
    read_so_far = Counter(name for name, _ in read(mixture, range(position + (length if at <= position else 0))))
    drawn = skipping.drawn(position)
    assert sum(drawn.values()) <= sum(read_so_far.values()) < sum(drawn.values()) + 40
    assert all(abs(drawn[name] - read_so_far[name]) < 40 for name in mixture.names)
    stage = mixture.stages[-1]
    end = stage.start + 3 * sum(stage.shares().values())
    exact = Counter(name for name, _ in read(mixture, range(end)))
    assert mixture.drawn(end) == {name: exact[name] for name in mixture.names}


@settings(max_examples=40, deadline=None)
@given(mixture=mixtures(), position=st.integers(1, 400), start=st.integers(1, 500))
def test_equal_identity_means_equal_past(mixture: Mixture, position: int, start: int) -> None:
    """A mixture changed in the middle of a run is told from the old one if it could have read something else."""
    stages = [stage for stage in mixture.stages if stage.start < start]
    old = Mixture(mixture.stages, mixture.sizes, 7)
    new = Mixture([*stages, Stage(start, {mixture.names[0]: 1.0})], mixture.sizes, 7)
    if old.identity(position) == new.identity(position):
        assert read(old, range(position)) == read(new, range(position))
    if start >= position + MAX_BLOCK:
        assert old.identity(position) == new.identity(position)
    skipping = Mixture(mixture.stages, mixture.sizes, 7, [(position, 10)])
    assert skipping.identity(position) == old.identity(position)
    assert skipping.identity(position + 1) != old.identity(position + 1)


def test_seeds_and_epochs_differ() -> None:
    """Each epoch of a source and each seed has an order of its own."""
    size = 1000
    commands = []
    for seed in (1, 2):
        mixture = Mixture([Stage(0, {".": 1.0})], {".": size}, seed)
        commands += [mixture.locate(u64(range(e * size, (e + 1) * size)))[1] for e in (0, 1)]
    for i, one in enumerate(commands):
        assert np.array_equal(np.sort(one), np.arange(size))
        for other in commands[:i]:
            assert np.count_nonzero(one == other) < 20


def test_another_source_leaves_the_others_alone() -> None:
    """A source added in a later stage does not change which sequences the others gave before."""
    first = Stage(0, {"b": 0.5, "c": 0.5})
    sizes = {"a": 50, "b": 60, "c": 70}
    alone, more = Mixture([first], sizes, 3), Mixture([first, Stage(200, {"a": 1.0})], sizes, 3)
    assert read(alone, range(200)) == read(more, range(200))


@pytest.mark.parametrize(("given_", "total"), [({"a": 0.6, "b": 0.5}, "1.1"), ({"a": 0.5}, "0.5"), ({}, "0")])
def test_weights_that_do_not_sum_to_one_are_refused(given_: dict[str, float], total: str) -> None:
    """The message says what they sum to."""
    with pytest.raises(MixtureError, match=f"sum to {total},"):
        Stage(0, given_).shares()


def test_weights_without_a_small_denominator_are_rounded() -> None:
    """Thirds written with 7 digits miss 1 by little enough; each source has a third of the largest block."""
    shares = Stage(0, {"a": 0.3333333, "b": 0.3333333, "c": 0.3333333}).shares()
    assert sum(shares.values()) == MAX_BLOCK
    assert max(shares.values()) - min(shares.values()) <= 1


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 100), min_size=1), st.integers(0, 1000))
def test_apportionment_stays_within_its_quotas(parts: dict[str, int], seats: int) -> None:
    """All seats are given, and to everybody the quota rounded down or up."""
    given_ = apportion(parts, seats)
    assert sum(given_.values()) == seats
    for name, part in parts.items():
        assert abs(given_[name] - Fraction(part * seats, sum(parts.values()))) < 1


def test_the_preset_is_smollm3() -> None:
    """Three stages of 41, 46 and 56 sources whose weights sum to 1, over 4.72 M steps in constant memory."""
    stages = tomllib.loads((MIXTURES / "smollm3.toml").read_text())["stages"]
    assert [(stage["start"], len(stage["weights"])) for stage in stages] == [
        (1, 41), (3_450_001, 46), (4_198_001, 56),
    ]  # fmt: skip
    plan = [Stage((stage["start"] - 1) * 576, stage["weights"]) for stage in stages]
    sizes = {name: 10_000_019 for stage in plan for name in stage.weights}
    mixture = Mixture(plan, sizes, 6)
    last = mixture.locate(u64(range(4_720_000 * 576 - 20_000, 4_720_000 * 576)))[0]
    counts = Counter(mixture.names[source] for source in last.tolist())
    assert counts["dclm"] == pytest.approx(0.29435 * 20_000, rel=0.1)
    assert set(counts) <= set(plan[-1].weights)
    assert replace(plan[0], start=1).shares()["dclm"] == 7400
