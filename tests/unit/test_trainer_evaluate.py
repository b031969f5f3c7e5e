"""The built-in evaluator, also beside lm-evaluation-harness, item by item."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tokenizers import Tokenizer, models

from opsd.trainer.data.shards import DOCUMENT, TOKENIZER, DataError, Framing
from opsd.trainer.data.tokenize import load_tokenizer, train_tokenizer
from opsd.trainer.evaluate import Model, Positions, at_equal_tokens, perplexity, reading, scored, trained_length
from opsd.trainer.hf.config import settings_of
from opsd.trainer.hf.weights import config_in, fill
from opsd.trainer.items import Item, Score, accuracies, read_items, standard_error, write_scores
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings, model_problem
from tests.fakes.tree import ROOT

# The built-in evaluator: perplexity, cloze, and the comparison with a reference run.


KINDS = ("global", "window", "nope")

STATES = {
    "pattern": ("delta", "global"), "state_heads": 2, "state_key_dim": 4, "state_value_dim": 4,
}  # fmt: skip

TEXTS = ["the cat sat on the mat and größer things", "a dog and a cat"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 290)


def model(tokenizer: Tokenizer, length: int = 64, **changes: object) -> Model:
    torch.manual_seed(0)
    shape = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn": 16, "vocab": 300} | changes
    return Model(Decoder(ModelSettings(**shape)), tokenizer, length)


def test_a_model_that_knows_nothing_has_the_loss_of_chance(tokenizer: Tokenizer) -> None:
    """With all logits equal, the loss is log(vocab), and bits per byte follow from the number of tokens and bytes."""
    ours = model(tokenizer)
    torch.nn.init.zeros_(ours._decoder.embedding.weight)
    results = perplexity(ours, iter(TEXTS), "set")
    tokens = sum(len(tokenizer.encode(text).ids) for text in TEXTS)
    size = sum(len(text.encode()) for text in TEXTS)
    assert results["set_loss"] == pytest.approx(math.log(300))
    assert results["set_bits_per_byte"] == pytest.approx(math.log2(300) * tokens / size)


def test_the_loss_by_position_adds_up(tokenizer: Tokenizer) -> None:
    """In powers of 2, up to a sequence; the tokens beyond it have another context than their position says."""
    ours, positions = model(tokenizer, length=20), Positions(20)
    texts = [TEXTS[0] * 3, TEXTS[1]]
    perplexity(ours, iter(texts), "set", positions)
    kept = [ours.log_likelihoods(text)[:20] for text in texts]
    assert list(positions.losses) == ["1", "2", "4", "8", "16", "32"]
    assert sum(count for _, count in positions.losses.values()) == sum(map(len, kept))
    assert positions.losses["8"][0] == pytest.approx(-float(torch.cat([each[4:8] for each in kept]).mean()))
    total = sum(loss * count for loss, count in positions.losses.values())
    assert total == pytest.approx(-sum(float(each.sum()) for each in kept))


def test_every_token_is_scored_once_however_long_the_text(tokenizer: Tokenizer) -> None:
    """A text of several windows has a likelihood for each token; with the marker, which never stands in a text."""
    text = f"{TEXTS[0]} {DOCUMENT} {TEXTS[1]}"
    short, long = model(tokenizer, length=7), model(tokenizer, length=64)
    assert short.log_likelihoods(text).shape == long.log_likelihoods(text).shape
    assert torch.allclose(short.log_likelihoods(text)[:7], long.log_likelihoods(text)[:7])


@pytest.mark.parametrize(
    ("length", "changes"),
    [(64, {}), (64, {"kv_heads": 2, "kv_rank": 6, "rope_dim": 2, "value_dim": 4}), (9, {}), (64, STATES)],
    ids=["whole", "latents", "longer than a sequence", "states"],
)
def test_choices_are_scored_as_if_read_one_by_one(
    tokenizer: Tokenizer, length: int, changes: dict[str, object]
) -> None:
    """With the context each, of which only the tokens that end after it count; also where they begin alike."""
    ours, context = model(tokenizer, length, **changes), "the cat sat on"
    for choices in [[" the mat", " the größer mat and things", " a dog"], [" a"], ["", " mat"]]:
        for choice, found in zip(choices, ours.continuations(context, choices), strict=True):
            ends = [end for _, end in tokenizer.encode(context + choice).offsets]
            own = sum(end > len(context) for end in ends)
            whole = [*ours._begin, *tokenizer.encode(context + choice).ids]
            expected = ours._read(whole[-length - 1 :])[-own:] if own else found[:0]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [4, 6, 9])
def test_a_choice_has_as_much_of_its_context_as_fits(tokenizer: Tokenizer, length: int) -> None:
    """The last tokens of a text that is too long are read as if it began so much later, never from a fixed cut."""
    ours, context = model(tokenizer, length), "a dog and " * 9 + "the cat sat on"
    for choice, found in zip([" a dog", " mat"], ours.continuations(context, [" a dog", " mat"]), strict=True):
        encoding = tokenizer.encode(context + choice)
        own = sum(end > len(context) for _, end in encoding.offsets)
        assert own <= length
        expected = ours._read(encoding.ids[-length - 1 :])[-own:]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    long = " ".join(TEXTS)
    ends = tokenizer.encode(context + long).offsets
    assert len(ours.continuations(context, [long])[0]) == sum(end > len(context) for _, end in ends) > length


def test_bytes_are_those_of_the_tokens_that_were_scored() -> None:
    """A tokenizer without all characters drops the others in silence; a set of which it drops much is refused."""
    narrow = Tokenizer(models.BPE(vocab={DOCUMENT: 0, "a": 1, "b": 2}, merges=[]))
    ours = model(narrow)
    seen = perplexity(ours, iter(["ab" * 500 + "\N{SNOWMAN}"]), "set")
    assert seen["set_bits_per_byte"] == pytest.approx(seen["set_loss"] / math.log(2))
    with pytest.raises(DataError, match=r"no token for 60\.0% of the evaluation set other"):
        perplexity(ours, iter(["ab\N{SNOWMAN}"]), "other")


def test_texts_longer_than_in_training_are_read_with_positions_of_training() -> None:
    """Layers with far positions have others then; the rest of the model is as it was, and so is all of a short text."""
    shape = ModelSettings(layers=4, width=16, heads=2, kv_heads=1, ffn=16, vocab=300, window=8, pattern=KINDS)
    assert reading(shape, 32, 32) == reading(shape, 32, 16) == shape
    longer = reading(shape, 32, 128)
    assert longer.kinds == ("dual_chunk", "window", "nope", "dual_chunk")
    assert (longer.dual_chunk, longer.dual_chunk_local) == (32, 8)
    assert reading(longer, 64, 256) == longer
    assert model_problem(longer) is None


def test_what_the_initial_model_was_trained_with_counts(tmp_path: Path) -> None:
    """Its own length, if that is more than the run's; one that is gone, or says none, has the run's."""
    assert trained_length("", 32) == trained_length(str(tmp_path / "gone"), 32) == 32
    for config, longest in (({"max_position_embeddings": 4096}, 4096), ({"max_position_embeddings": 16}, 32), ({}, 32)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert trained_length(str(tmp_path), 32) == longest


def test_the_likeliest_choice_wins(tokenizer: Tokenizer) -> None:
    """A model trained on one continuation prefers it to another, and length is no advantage."""
    ours = model(tokenizer)
    optimizer = torch.optim.Adam(ours._decoder.parameters(), lr=1e-2)
    ids = torch.tensor([[tokenizer.token_to_id(DOCUMENT), *tokenizer.encode("the cat sat").ids]])
    for _ in range(60):
        documents = torch.zeros(1, ids.shape[1] - 1, dtype=torch.int32)
        loss = ours._decoder(ids[:, :-1], documents, ids[:, 1:])
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    items = [Item("the cat", (" sat", " and größer things"), 0), Item("the cat", (" a", " sat"), 1)]
    assert set(accuracies(scored(ours, items), "set").values()) == {1.0}
    others = [replace(item, answer=1 - item.answer) for item in items]
    assert set(accuracies(scored(ours, others), "set").values()) == {0.0}


def test_empty_sets_are_refused(tokenizer: Tokenizer) -> None:
    """A set without a token or an item is named, not scored as 0."""
    with pytest.raises(DataError, match="set has no text"):
        perplexity(model(tokenizer), iter([]), "set")
    with pytest.raises(DataError, match="set has no items"):
        accuracies([], "set")


def test_choices_are_listed_with_letters() -> None:
    """MCF asks for the letter: the choices stand before the word that asks, once."""
    item = Item("Question: What barks?\nAnswer:", (" a cat", " a dog"), 1)
    letters = item.as_letters
    assert letters.context == "Question: What barks?\n A. a cat\n B. a dog\nAnswer:"
    assert (letters.choices, letters.answer) == ((" A", " B"), 1)
    assert replace(item, context="Question: What barks?").as_letters == letters
    with pytest.raises(DataError, match="27 choices, more than there are letters"):
        _ = Item("", (" a",) * 27, 0).as_letters


def test_lengths_leave_out_the_space_before_a_choice(tmp_path: Path) -> None:
    """Each length may have another winner; the scores of single items are kept, whole."""
    score = Score.of(Item("a", (" größer", " aaaaaaa"), 0), [[-2.0, -5.5], [-8.0]])
    assert (score.characters, score.bytes, score.tokens) == ((6, 7), (8, 7), (2, 1))
    assert [score.is_right(lengths) for lengths in (None, score.characters, score.bytes)] == [True, False, True]
    write_scores(tmp_path / "scores" / "set.jsonl", [score, score])
    lines = [json.loads(line) for line in (tmp_path / "scores" / "set.jsonl").read_text().splitlines()]
    assert lines[1] == {
        "item": 2, "answer": 0, "log_likelihoods": [-7.5, -8.0], "tokens": [2, 1], "characters": [6, 7],
        "bytes": [8, 7],
    }  # fmt: skip
    assert accuracies([score], "set", letters=True) == {"set_mc_accuracy": 1.0}
    assert standard_error(0.5, 101) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "line",
    [
        '{"context": "a", "choices": ["b", 5], "answer": 0}',
        "{",
        '{"context": "a", "choices": ["b"], "answer": 1}',
        '{"context": "a"}',
        '{"context": "a", "choices": ["b"], "answer": 0}',
        '{"context": "a", "choices": "bc", "answer": 0}',
        '{"context": "a", "choices": ["b", "c"], "answer": true}',
        '{"context": "a", "choices": ["b", "c"], "answer": 1.0}',
        '{"context": "a\\ud800", "choices": ["b", "c"], "answer": 1}',
        "[" * 100_000,
    ],
)
def test_bad_items_are_named(tmp_path: Path, line: str) -> None:
    """A line that is no item is refused with its number."""
    (tmp_path / "set.jsonl").write_text('{"context": "a", "choices": ["b", "c"], "answer": 1}\n' + line)
    with pytest.raises(DataError, match=r"set\.jsonl, line 2"):
        read_items(tmp_path / "set.jsonl")


def test_items_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Tables that are exported on Windows do, and corpora are read that way too."""
    line = '{"context": "a", "choices": ["b", "c"], "answer": 1}\n'
    (tmp_path / "set.jsonl").write_text(line, encoding="utf-8-sig")
    assert read_items(tmp_path / "set.jsonl") == [Item("a", ("b", "c"), 1)]


def test_the_reference_is_read_at_equal_tokens(tmp_path: Path) -> None:
    """Between two evaluations of the reference run its results are interpolated; outside of them there are none."""
    path = tmp_path / "evaluations.jsonl"
    lines = [{"tokens": 300, "results": {"a": 2.0}}, {"tokens": 100, "results": {"a": 4.0, "b": 1.0}}]
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"tokens": 200, "results": {}}]))
    assert at_equal_tokens(path, 150) == {"a": 3.5}
    assert at_equal_tokens(path, 100) == {"a": 4.0, "b": 1.0}
    assert at_equal_tokens(path, 301) == {}
    path.write_text("no json")
    with pytest.raises(DataError, match=r"is not the evaluations\.jsonl of a run"):
        at_equal_tokens(path, 150)


# The judge beside lm-evaluation-harness, item by item; ``tests/outside/lm_eval`` has what that made of the items.


FOLDER: Final = ROOT / "tests" / "outside" / "lm_eval"

LENGTH: Final = 96

torch.set_num_threads(1)


def lines(name: str) -> dict[str, list[Mapping[str, Any]]]:
    found = [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
    return {task: list(group) for task, group in groupby(found, itemgetter("task"))}


ITEMS, RECORDED = lines("items.jsonl"), lines("recorded.jsonl")


@pytest.fixture(scope="module")
def judged_model() -> Model:
    folder = FOLDER / "model"
    decoder = Decoder(settings_of(config_in(folder)))
    fill(decoder, folder)
    return Model(decoder, load_tokenizer(folder / TOKENIZER), LENGTH, Framing("</s>", ("<s>",)))


def item_of(line: Mapping[str, Any]) -> Item:
    return Item(line["context"], tuple(line["delimiter"] + choice for choice in line["choices"]), line["answer"])


@pytest.mark.parametrize("task", ITEMS)
def test_each_item_has_the_scores_of_the_harness(judged_model: Model, task: str) -> None:
    """Likelihoods to 1e-4, and which choice wins by itself, per character and per byte, in ten kinds of tasks.

    Among them are contexts longer than a sequence, white space at the end of a context, and cuts within words.
    """
    ours = scored(judged_model, map(item_of, ITEMS[task]))
    for score, theirs in zip(ours, RECORDED[task], strict=True):
        expected = torch.tensor(theirs["log_likelihoods"])
        torch.testing.assert_close(torch.tensor(score.log_likelihoods), expected, rtol=1e-5, atol=1e-4)
        lengths = {"acc": None, "acc_norm": score.characters, "acc_bytes": score.bytes}
        assert {name: float(score.is_right(each)) for name, each in lengths.items()} == {
            name: theirs[name] for name in lengths
        }
    means = {name: sum(line[name] for line in RECORDED[task]) / len(ours) for name in ("acc", "acc_norm", "acc_bytes")}
    assert accuracies(ours, "set") == {
        "set_accuracy": means["acc_bytes"], "set_accuracy_norm": means["acc_norm"], "set_accuracy_raw": means["acc"],
    }  # fmt: skip


def test_the_tasks_are_what_they_are_called() -> None:
    """Ten tasks, each with items; what the harness recorded belongs to them."""
    assert len(ITEMS) == 10
    assert {task: len(items) for task, items in ITEMS.items()} == {task: len(each) for task, each in RECORDED.items()}
    assert all(line["context"].endswith(" ") for line in ITEMS["space_before"])
