"""The judge beside lm-evaluation-harness, item by item; ``tests/outside/lm_eval`` has what that made of the items."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import pytest
import torch

from opsd.commands.checkout import ROOT
from opsd.trainer.data.shards import TOKENIZER, Framing
from opsd.trainer.data.tokenize import load_tokenizer
from opsd.trainer.evaluate import Model, scored
from opsd.trainer.hf.config import settings_of
from opsd.trainer.hf.weights import config_in, fill
from opsd.trainer.items import Item, accuracies
from opsd.trainer.model import Decoder

FOLDER: Final = ROOT / "tests" / "outside" / "lm_eval"
LENGTH: Final = 96

torch.set_num_threads(1)


def lines(name: str) -> dict[str, list[Mapping[str, Any]]]:
    found = [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
    return {task: list(group) for task, group in groupby(found, itemgetter("task"))}


ITEMS, RECORDED = lines("items.jsonl"), lines("recorded.jsonl")


@pytest.fixture(scope="module")
def model() -> Model:
    folder = FOLDER / "model"
    decoder = Decoder(settings_of(config_in(folder)))
    fill(decoder, folder)
    return Model(decoder, load_tokenizer(folder / TOKENIZER), LENGTH, Framing("</s>", ("<s>",)))


def item_of(line: Mapping[str, Any]) -> Item:
    return Item(line["context"], tuple(line["delimiter"] + choice for choice in line["choices"]), line["answer"])


@pytest.mark.parametrize("task", ITEMS)
def test_each_item_has_the_scores_of_the_harness(model: Model, task: str) -> None:
    """Likelihoods to 1e-4, and which choice wins by itself, per character and per byte, in ten kinds of tasks.

    Among them are contexts longer than a sequence, white space at the end of a context, and cuts within words.
    """
    ours = scored(model, map(item_of, ITEMS[task]))
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
