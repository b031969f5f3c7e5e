"""A training step reads the device once. Its collectives, copies, graph breaks and collections are counted too."""

from __future__ import annotations

import gc
import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from opsd.commands.checkout import ROOT
from opsd.trainer.attention import Packed, attention_inputs
from opsd.trainer.data.loader import copied
from opsd.trainer.data.tokenize import make_corpus, train_tokenizer
from opsd.trainer.data.worker import Form, Plan, slot_views
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.train import COLLECT_EVERY, Collections

LAYERS = 4
"""Of the preset tiny."""
TEXTS = [f"the {word} sat on the mat and looked at {word}s " * 40 for word in ("cat", "dog", "bird", "fish")] * 30


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    make_corpus(TEXTS, train_tokenizer(TEXTS, 300), folder, 100_000)
    return folder


def counted(shards: Path, ranks: int, source: str, *overrides: str) -> dict[str, Any]:
    """See ``tests.fakes.step_counts``; in a process of its own, since it replaces methods of tensors."""
    words = [sys.executable, "-m", "tests.fakes.step_counts", str(ranks), source, f"data.shards={shards}", *overrides]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


ONE_READ = {"tolist in sum": 1}


def test_one_rank_reads_the_device_once(shards: Path) -> None:
    """All that the ranks agree on is one all-reduce of 7 numbers, and one read of its result."""
    found = counted(shards, 1, "tiny")
    assert found == {"reads": ONE_READ, "counts": {"allreduce": 1}, "bytes": {"allreduce": 7 * 8}}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"allgather": 2 * 2 * LAYERS + 2, "reduce_scatter": LAYERS + 1, "allreduce": 1}),
        (
            ["optimizer.kind=muon"],
            {"allgather": 2 * 2 * LAYERS + 2, "reduce_scatter": LAYERS + 1, "allreduce": 1, "alltoall": 2},
        ),
    ],
    ids=["adamw", "muon"],
)
def test_sharded_layers_are_gathered_twice_a_micro_batch(
    shards: Path, overrides: list[str], expected: dict[str, int]
) -> None:
    """With two micro-batches; gradients are reduced once a step, and Muon exchanges matrices twice."""
    found = counted(shards, 4, "tiny", "data.batch=8", "data.micro_batch=1", *overrides)
    assert (found["reads"], found["counts"]) == (ONE_READ, expected)


@pytest.mark.parametrize(
    ("changes", "breaks"),
    [
        ({}, 0),
        ({"kv_rank": 8, "rope_dim": 4}, 0),
        ({"pattern": ("delta",), "state_heads": 2, "state_key_dim": 8, "state_value_dim": 8}, 0),
        ({"pattern": ("mamba",), "state_heads": 2, "state_key_dim": 8, "state_value_dim": 8}, 0),
        ({"experts": 4, "experts_per_token": 2, "shared_experts": 1}, 2),
    ],
    ids=["dense", "latent", "delta", "mamba", "experts"],
)
def test_graph_breaks_of_a_layer(changes: dict[str, Any], breaks: int) -> None:
    """A layer is one graph; only the experts of a layer, whose shapes depend on the data, are outside."""
    shape = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 64} | changes
    model = Decoder(ModelSettings(**shape))
    torch._dynamo.reset()
    counters.clear()
    inputs = attention_inputs(torch.zeros(1, 64, dtype=torch.int32), model.settings)
    model.routing.begin(1, torch.device("cpu"))
    torch.compile(model.blocks["0"].forward, backend="eager")(torch.randn(1, 64, 32, requires_grad=True), inputs)
    assert sum(counters["graph_break"].values()) == breaks
    torch._dynamo.reset()


class Operations(TorchDispatchMode):
    """The bytes of each copy to a device, and the number of waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[int] = []
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default or func is torch.ops.aten.clone.default:
            self.copies.append(result.nbytes)
        self.waits += func is torch.ops.aten.nonzero.default
        return result


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_micro_batch_is_one_copy(device: str) -> None:
    """Tokens, targets and documents go to the device together, and are what the worker has written."""
    form = Form(0, 5, 3)
    plan = Plan({}, [], [form], [], 0, 0, 1, 2, -1, 0)
    memory = mmap.mmap(-1, 2 * plan.slot_bytes)
    written = slot_views(memory, plan, 1, form)
    for view in written:
        view[:] = np.arange(view.size).reshape(view.shape)
    with Operations() as operations:
        tokens, documents = copied(memory, plan, 1, form, torch.device(device))
    assert operations.copies == [3 * 6 * 8 + 3 * 5 * 4]
    assert (tokens.shape, documents.shape) == ((3, 6), (3, 5))
    if device == "cpu":
        expected = [view.copy() for view in written]
        for view in written:
            view[:] = 0  # the slot is filled again
        assert np.array_equal(tokens.numpy(), expected[0])
        assert np.array_equal(documents.numpy(), expected[1])


def test_documents_are_packed_once_for_all_kinds_of_layers() -> None:
    """Finding where they begin waits for the device, so layers with and without a window share it."""
    settings = ModelSettings(
        layers=2, width=16, heads=2, kv_heads=2, ffn=8, vocab=9, pattern=("global", "window"), window=3,
        attention="varlen", dtype="bfloat16",
    )  # fmt: skip
    with Operations() as operations:
        masks = attention_inputs(torch.tensor([[0, 0, 1, 1]]), settings).masks
    whole, window = masks["global"], masks["window"]
    assert isinstance(whole, Packed)
    assert isinstance(window, Packed)
    assert (whole.window, window.window, operations.waits) == (0, 3, 1)
    assert whole.starts is window.starts


def test_garbage_is_collected_at_steps_alone() -> None:
    """However much there is, and as before once the training is over, also by an error."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    with pytest.raises(KeyError), Collections() as garbage:
        gc.callbacks.append(note)
        for step in range(1, 2 * COLLECT_EVERY):
            for _ in range(100):
                cycle: list[object] = []
                cycle.append(cycle)
            garbage.after(step)
        gc.callbacks.remove(note)
        raise KeyError
    assert generations == [1]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
