"""Mixtures of sources in stages: exact shares, their order, and proposed weights."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.trainer.accumulate import fitting_ranks, micro_batches
from opsd.trainer.config import MIXTURES, Config, ConfigError, load
from opsd.trainer.data.mixture import Mixture, permute
from opsd.trainer.data.propose import Ablation, propose, read_run
from opsd.trainer.data.shards import DataError, sequences_within
from opsd.trainer.data.stages import MAX_BLOCK, MixtureError, Stage, apportion
from opsd.trainer.data.worker import Form, Plan
from opsd.trainer.data.worker import micro_batches as of_rank

# Mixtures of sources in stages: exact shares, whole epochs, and an order that depends on nothing but the sample.


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


# Keyed permutations: the building stone of the order of the samples.


KEYS = st.integers(0, 2**64 - 1)


def permuted(index: np.ndarray, size: int, key: int) -> np.ndarray:
    return permute(index, np.full(index.shape, size, np.uint64), np.full(index.shape, key, np.uint64))


@given(size=st.integers(1, 3000), key=KEYS)
def test_it_is_a_bijection(size: int, key: int) -> None:
    """Every element of the range is hit exactly once."""
    assert np.array_equal(np.sort(permuted(u64(range(size)), size, key)), np.arange(size))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 0.999), KEYS), min_size=1, max_size=20))
def test_elements_do_not_depend_on_each_other(elements: list[tuple[int, float, int]]) -> None:
    """With ranges and keys of their own, elements come out together as they do alone."""
    size, key = u64([size for size, _, _ in elements]), u64([key for _, _, key in elements])
    index = u64([int(size * at) for size, at, _ in elements])
    together = permute(index, size, key)
    alone = [permute(index[i : i + 1], size[i : i + 1], key[i : i + 1])[0] for i in range(len(elements))]
    assert np.array_equal(together, alone)


@settings(max_examples=20)
@given(size=st.integers(2, 2**62), key=KEYS)
def test_huge_ranges_stay_inside(size: int, key: int) -> None:
    """Corpora far beyond memory are permuted into their own range, without collisions."""
    index = u64(np.linspace(0, size - 1, min(size, 200), dtype=np.uint64))
    index = np.unique(np.minimum(index, np.uint64(size - 1)))
    placed = permuted(index, size, key)
    assert placed.max() < size
    assert np.unique(placed).size == index.size


def test_keys_differ() -> None:
    """Neighbouring keys give unrelated orders, and none is the order of the numbers."""
    size = 1000
    orders = [permuted(u64(range(size)), size, key) for key in range(4)] + [np.arange(size, dtype=np.uint64)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.count_nonzero(one == other) < 20


@pytest.mark.parametrize("size", [100_000, 65_536, 99_991])
def test_neighbours_are_scattered(size: int) -> None:
    """Consecutive elements lie as far apart as in a random order: a third of the range in the mean."""
    order = permuted(u64(range(size)), size, 3).astype(np.int64)
    assert np.abs(np.diff(order)).mean() == pytest.approx(size / 3, rel=0.02)


@pytest.mark.parametrize("size", [5, 12, 30])
def test_small_ranges_are_random_too(size: int) -> None:
    """Over many keys every element goes to every place about equally often."""
    keys = u64(range(4000)).repeat(size) * np.uint64(0x9E3779B97F4A7C15)
    index = np.tile(u64(range(size)), 4000)
    placed = permute(index, np.full(index.shape, size, np.uint64), keys)
    counts = np.zeros((size, size))
    np.add.at(counts, (index, placed), 1)
    assert counts.min() > 4000 / size * 0.6
    assert counts.max() < 4000 / size * 1.4


# Weights of a mixture that are proposed from small runs.


SLOPES = {"web": 3.0, "code": 2.0, "math": 2.5}
"""Losses of a run on one source alone."""


def ablations(count: int, noise: float = 0.0) -> list[Ablation]:
    drawn = random.Random(1)
    runs = []
    for number in range(count):
        parts = [drawn.random() for _ in SLOPES]
        weights = {name: part / sum(parts) for name, part in zip(SLOPES, parts, strict=True)}
        loss = sum(weights[name] * slope for name, slope in SLOPES.items()) + drawn.gauss(0, noise)
        runs.append(Ablation(f"run-{number}", weights, {"held": loss, "other": 9 - loss}))
    return runs


def test_it_goes_where_the_losses_fall() -> None:
    """The proposal has more of what lowers the wanted loss, and is predicted to be about as good as the best run."""
    found = propose(ablations(12), {"held": 1.0})
    assert sum(found.weights.values()) == pytest.approx(1)
    assert found.weights["code"] > max(found.weights["web"], 0.4)
    assert found.predicted == pytest.approx(sum(found.weights[name] * SLOPES[name] for name in SLOPES), abs=1e-3)
    assert found.error < 1e-3
    against = propose(ablations(12), {"other": 2.0})
    assert against.weights["web"] > found.weights["web"]


def test_it_says_how_far_predictions_are_off() -> None:
    """Noise of the losses is in the error, which comes from runs that were left out."""
    assert 0.05 < propose(ablations(30, noise=0.1), {"held": 1.0}).error < 0.2


@pytest.mark.parametrize(("runs", "targets", "expected"), [
    (ablations(3), {}, "3 runs of 3 sources; it takes 2 sources and more runs than sources"),
    (ablations(6), {"code": 1.0}, "not every run has been evaluated on 'code'; they share held, other"),
    ([ablations(1)[0]] * 6, {}, "too similar mixtures"),
])  # fmt: skip
def test_too_little_is_refused(runs: list[Ablation], targets: dict[str, float], expected: str) -> None:
    """In one sentence."""
    with pytest.raises(DataError, match=expected):
        propose(runs, targets)


def write_run(folder: Path, run: Ablation) -> None:
    weights = ", ".join(f"{name} = {weight:.3f}" for name, weight in run.weights.items())
    weights = weights.rpartition(" = ")[0] + f" = {1 - sum(round(w, 3) for w in [*run.weights.values()][:-1]):.3f}"
    config = load("tiny", ["data.shards=/d", f"data.stages=[{{start = 1, weights = {{{weights}}}}}]"], {})
    folder.mkdir()
    (folder / "config.json").write_text(config.model_dump_json())
    results = [{"held_loss": 9.0}, {"held_loss": run.losses["held"], "held_bits_per_byte": 1.0}, {}]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps({"results": one}) + "\n" for one in results))


def test_from_the_folders_of_runs(tmp_path: Path) -> None:
    """The command prints weights for a stage; the last losses count, and a failed evaluation after them does not."""
    for run in ablations(6):
        write_run(tmp_path / run.name, run)
    assert read_run(tmp_path / "run-2").losses == {"held": ablations(6)[2].losses["held"]}
    command = [sys.executable, "-m", "opsd.trainer.data", "propose", *map(str, sorted(tmp_path.glob("run-*")))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[0]
    assert load("tiny", ["data.shards=/d", f"data.stages=[{{start = 1, {line}}}]"], {}).data.sources[0] == "code"
    refused = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"opsd: {tmp_path} is not the folder of a run with evaluations")


# Stages that change sequences, positions and batch: what follows from the settings, and what is refused.


FIRST = "{start = 1, weights = {web = 0.5, books = 0.5}}"

LONGER = "{start = 11, sequence = 1024, batch = 2, micro_batch = 1, rope_theta = 2e6, long_documents = {books = 0.4}}"

YARN = "{start = 21, yarn_factor = 4.0, yarn_positions = 1024}"


def config(*overrides: str, stages: str = f"{FIRST}, {LONGER}, {YARN}") -> Config:
    return load("tiny", ["data.shards=/data", f"data.stages=[{stages}]", *overrides], {})


def mixture_of(settings: Config, size: int = 1000) -> Mixture:
    return settings.data.mix(dict.fromkeys(settings.data.cuts(), size), 1)


def test_what_a_stage_leaves_out_stays() -> None:
    """Each stage goes on with the weights, lengths, batches and positions of the one before."""
    run = config()
    first, longer, yarn = run.data.shapes
    assert (first.sequence, first.batch, first.micro_batch, first.rope) == (256, 4, 2, ())
    assert (longer.start, longer.sequence, longer.batch, longer.micro_batch) == (11, 1024, 2, 1)
    assert (yarn.start, yarn.sequence, yarn.batch) == (21, 1024, 2)
    model = run.model_with(yarn)
    assert (model.rope_theta, model.yarn_factor, model.yarn_positions) == (2e6, 4.0, 1024)
    assert run.data.shape_at(10) == first
    assert run.data.position(21) == 10 * 4 + 10 * 2
    assert run.data.tokens(run.data.position(21)) == 10 * 4 * 256 + 10 * 2 * 1024


def test_a_source_is_cut_anew() -> None:
    """With other lengths a source is drawn from the beginning of an order of its own, long documents beside it."""
    cuts = config().data.cuts()
    assert sorted(cuts) == ["books", "books/1024", "books/1024/long", "web", "web/1024"]
    assert [(cut.length, cut.within) for cut in map(cuts.__getitem__, ("books", "books/1024/long"))] == [
        (256, False), (1024, True),
    ]  # fmt: skip
    mixture = mixture_of(config())
    shares = mixture.stages[1].shares()
    assert {name: share / sum(shares.values()) for name, share in shares.items()} == {
        "web/1024": 0.5, "books/1024": 0.3, "books/1024/long": 0.2,
    }  # fmt: skip


@pytest.mark.parametrize("skip", ["[[4, 6]]", "[[4, 6], [9, 9]]", "[[9, 13]]"])
def test_a_skip_moves_no_stage(skip: str) -> None:
    """Stages begin at their steps whatever is skipped, and what was trained on before a skip stays as it was."""
    plain, skipping = mixture_of(config()), mixture_of(config(f"data.skip={skip}"))
    before = 3 * 4 if "[4" in skip else 8 * 4
    both = [mixture.locate(np.arange(before, dtype=np.uint64)) for mixture in (plain, skipping)]
    assert all(np.array_equal(one, other) for one, other in zip(*both, strict=True))
    sources, _ = skipping.locate(np.arange(20 * 4, dtype=np.uint64))
    lengths = [config().data.cuts()[skipping.names[source]].length for source in sources]
    assert lengths == [256] * 40 + [1024] * 40
    assert plain.identity(before) == skipping.identity(before)


def test_ranks_read_parts_of_every_step() -> None:
    """Micro-batches before and after a change belong to one step each, from whichever step a rank begins."""
    forms = [Form(0, 32, 2), Form(16, 64, 1)]
    plans = [Plan({}, [], forms, [], 1, rank, 2, 4, -1, 0) for rank in (0, 1)]
    read = [[(sample, form.length) for sample, form in islice(of_rank(plan, 8), 5)] for plan in plans]
    assert read[0] == [(8, 32), (12, 32), (16, 64), (18, 64), (20, 64)]
    assert read[1] == [(10, 32), (14, 32), (17, 64), (19, 64), (21, 64)]
    assert plans[0].slot_bytes == 2 * (33 * 8 + 32 * 4)


@pytest.mark.parametrize(("starts", "tokens", "expected"), [
    ([0, 3, 20, 25], 40, [3, 11, 25]), ([0], 8, []), ([0], 9, [0]), ([0, 2, 4], 6, []), ([], 0, []),
])  # fmt: skip
def test_sequences_within_documents(starts: list[int], tokens: int, expected: list[int]) -> None:
    """They begin with a document, or with what is left of it, and end in it; a shard's last token is a target only."""
    assert sequences_within(np.array(starts, np.int64), tokens, 8).tolist() == expected


def test_the_state_belongs_to_the_positions_so_far() -> None:
    """A stage to come may change its lengths and positions, one that has begun may not."""

    def digest(stages: str, position: int) -> str:
        run = config(stages=stages)
        names = dict.fromkeys(run.data.cuts(), "x")
        return run.digest(mixture_of(run), names, position)

    for other in (LONGER.replace("2e6", "3e6"), LONGER.replace("1024", "512"), LONGER.replace("0.4", "0.5")):
        stages = f"{FIRST}, {other}, {YARN}"
        assert digest(stages, 40) == digest(f"{FIRST}, {LONGER}, {YARN}", 40) == digest(FIRST, 40)
        assert digest(stages, 44) != digest(f"{FIRST}, {LONGER}, {YARN}", 44)
    assert digest(f"{FIRST}, {LONGER}", 60) == digest(f"{FIRST}, {LONGER}, {YARN}", 60)
    assert digest(f"{FIRST}, {LONGER}", 62) != digest(f"{FIRST}, {LONGER}, {YARN}", 62)


def test_all_shapes_decide_which_ranks_fit() -> None:
    """Numbers of ranks have to divide the batches of all stages."""
    run = config("data.batch=8")
    assert fitting_ranks(run) == [1, 2]
    assert list(micro_batches(run, 2).values()) == [2, 1, 1]
    with pytest.raises(ConfigError, match=r"data\.batch 2 from step 11 is not a multiple of 4 ranks"):
        micro_batches(run, 4)


@pytest.mark.parametrize(("overrides", "stages", "expected"), [
    (["parallel.cp=2"], f"{FIRST}, {{start = 5, sequence = 258}}", "from step 5: data.sequence 258 is not a multiple"),
    ([], f"{FIRST}, {{start = 5, yarn_factor = 2.0}}", "from step 5: model.yarn_factor needs model.yarn_positions"),
    ([], f"{FIRST}, {{start = 5, yarn_factor = 0.5}}", "yarn_factor 0.5 is less than 1"),
    ([], f"{FIRST}, {{start = 5, long_documents = {{math = 0.5}}}}", "names 'math', which has no weight"),
    ([], f"{FIRST}, {{start = 5, long_documents = {{web = 1.5}}}}", "less than or equal to 1"),
    (["data.batch_warmup=[[7, 2]]"], f"{FIRST}, {{start = 5, batch = 8}}", "before the end of data.batch_warmup"),
    ([], f"{FIRST}, {{start = 5, window = 8}}", "unknown key data.stages.1.window"),
])  # fmt: skip
def test_what_cannot_be_is_refused(overrides: list[str], stages: str, expected: str) -> None:
    """In one sentence with the stage, before anything starts."""
    with pytest.raises(ConfigError) as error:
        config(*overrides, stages=stages)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_can_say_it(tmp_path: Path) -> None:
    """As tables of a TOML file, with the weights of the only corpus left out."""
    (tmp_path / "long.toml").write_text(
        "[[stages]]\nstart = 1\n\n[[stages]]\nstart = 5\nsequence = 512\n[stages.long_documents]\n'.' = 0.5\n"
    )
    run = load("tiny", ["data.shards=/data", f"data.mixture={tmp_path / 'long.toml'}"], {})
    assert sorted(run.data.cuts()) == [".", "./512", "./512/long"]
