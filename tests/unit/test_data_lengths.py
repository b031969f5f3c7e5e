"""Long documents of the sources of a run, and what its stages draw of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd.commands.main import cli
from opsd.data.lengths import look
from opsd.trainer.config import load
from opsd.trainer.data.tokenize import make_corpus, train_tokenizer

WORDS = {"web": [5, 9, 40, 200, 7, 80], "books": [300, 500, 20]}


@pytest.fixture
def overrides(tmp_path: Path) -> tuple[str, ...]:
    """Settings of a run of two stages, the second of longer sequences that prefers long documents."""
    texts = {name: [" ".join(["word"] * count) for count in counts] for name, counts in WORDS.items()}
    tokenizer = train_tokenizer([text for each in texts.values() for text in each], 300)
    for name, each in texts.items():
        make_corpus(each, tokenizer, tmp_path / "shards" / name, shard_tokens=250)
    stages = (
        "[{start = 1, weights = {web = 0.5, books = 0.5}}, "
        "{start = 11, weights = {web = 0.25, books = 0.75}, sequence = 64, long_documents = {books = 0.5}}]"
    )
    return (
        f"data.shards={tmp_path / 'shards'}", f"data.stages={stages}", "data.sequence=16", "data.batch=8",
        "run.steps=20", "schedule.warmup=2", "schedule.decay_start=15", "schedule.decay_end=20",
    )  # fmt: skip


def test_lengths_and_draws_equal_a_count_by_hand(overrides: tuple[str, ...]) -> None:
    """Of each source the share of tokens in long documents; of each stage its samples and what there is for them."""
    found, drawn = look(load("tiny", overrides), [100])
    for each in found:
        lengths = [count + 1 for count in WORDS[each.source]]  # a token a word, and the separator
        assert (each.documents, each.tokens) == (len(lengths), sum(lengths))
        assert each.long[100] == pytest.approx(sum(n for n in lengths if n >= 100) / sum(lengths))
    by_cut = {(row.start, row.source, row.within): row for row in drawn}
    assert by_cut[1, "web", False].samples == by_cut[1, "books", False].samples == 40
    assert by_cut[11, "web", False].samples == 20
    assert by_cut[11, "books", False].samples == by_cut[11, "books", True].samples == 30
    long = by_cut[11, "books", True]
    assert long.sequence == 64
    assert long.available in (301 // 64 + 501 // 64, 301 // 64 + 501 // 64 - 1)
    assert long.epochs == pytest.approx(30 / long.available)


def test_the_command_tells(overrides: tuple[str, ...]) -> None:
    """Both tables; a run without shards is refused in a sentence."""
    told = CliRunner().invoke(cli, ["data", "lengths", "tiny", *(w for each in overrides for w in ("--set", each))])
    assert told.exit_code == 0, told.output
    assert ">= 32,768" in told.output
    assert told.output.count("books") == 4
    refused = CliRunner().invoke(cli, ["data", "lengths", "tiny", "--set", "data.shards=none"])
    assert refused.exit_code == 2
