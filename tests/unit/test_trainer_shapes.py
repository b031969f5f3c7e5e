"""Stages that change sequences, positions and batch: what follows from the settings, and what is refused."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from opsd.trainer.accumulate import fitting_ranks, micro_batches
from opsd.trainer.config import Config, ConfigError, load
from opsd.trainer.data.mixture import Mixture
from opsd.trainer.data.shards import sequences_within
from opsd.trainer.data.worker import Form, Plan
from opsd.trainer.data.worker import micro_batches as of_rank

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
