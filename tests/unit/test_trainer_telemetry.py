"""What a step costs and says: the clock, the metrics, the lines on the terminal."""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from opsd.trainer.accumulate import MOST_PENDING, GpuClock
from opsd.trainer.attention import Packed, attention_inputs
from opsd.trainer.config import Config, load
from opsd.trainer.counts import flops_per_token, parameters
from opsd.trainer.data.loader import copied
from opsd.trainer.data.tokenize import make_corpus, train_tokenizer
from opsd.trainer.data.worker import Form, Plan, slot_views
from opsd.trainer.experts import LOADS
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.telemetry import LoadsLog, MetricsLog, StepLines
from opsd.trainer.train import COLLECT_EVERY, Collections
from tests.fakes.tree import ROOT, tmpfs

# A training step reads the device once. Its collectives, copies, graph breaks and collections are counted too.


LAYERS = 4
"""Of the preset tiny."""

TEXTS = [f"the {word} sat on the mat and looked at {word}s " * 40 for word in ("cat", "dog", "bird", "fish")] * 30


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    make_corpus(TEXTS, train_tokenizer(TEXTS, 300), folder, 100_000)
    return folder


def counted(shards: Path, ranks: int, source: str, *overrides: str) -> dict[str, Any]:
    """See ``tests.fakes.live_memory``; in a process of its own, since it replaces methods of tensors."""
    words = [sys.executable, "-m", "tests.fakes.live_memory", str(ranks), source, f"data.shards={shards}", *overrides]
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


# metrics.jsonl: whole lines or none, exact numbers, and never a reason to stop.


@pytest.fixture
def config() -> Config:
    return load("tiny", ["data.shards=/data", "metrics.peak_flops=1e12"], {})


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_floats_keep_every_bit(tmp_path: Path, config: Config) -> None:
    """What is read back is the number that was written."""
    log = MetricsLog(tmp_path / "m.jsonl", config, ranks=2)
    values = [0.1 + 0.2, 1 / 3, math.pi * 1e-300, 5e-324]
    for value in values:
        log.write(step=1, loss=value)
    assert [line["loss"] for line in lines(tmp_path / "m.jsonl")] == values


def test_mfu_is_of_all_ranks_and_counts_attention(tmp_path: Path, config: Config) -> None:
    """MFU is model FLOP/s, attention included, over the peak of all ranks."""
    flops = flops_per_token(config.model, config.data.sequence)
    log = MetricsLog(tmp_path / "m.jsonl", config, ranks=2)
    log.begin(config.data.shape_at(1), flops)
    log.write(step=1)
    (line,) = lines(tmp_path / "m.jsonl")
    per_token = 6 * parameters(config.model) + 12 * 4 * 128 * 256
    assert line["mfu"] == pytest.approx(line["tokens_per_s"] * per_token / 2e12)
    assert line["tokens_per_s"] == pytest.approx(4 * 256 / line["step_s"])


def test_numbers_that_are_none_become_null(tmp_path: Path, config: Config) -> None:
    """NaN and infinity are not JSON; they are written as null."""
    MetricsLog(tmp_path / "m.jsonl", config, 1).write(step=1, loss=math.nan, grad_norm=math.inf, lr=0.5)
    text = (tmp_path / "m.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text}"))
    assert (line["loss"], line["grad_norm"], line["lr"]) == (None, None, 0.5)


def test_a_next_start_appends(tmp_path: Path, config: Config) -> None:
    """Every start of a run adds to the same file."""
    for step in (1, 2):
        MetricsLog(tmp_path / "m.jsonl", config, 1).write(step=step)
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1, 2]


def test_a_full_disk_drops_whole_lines(tmp_path: Path, config: Config, capfd: pytest.CaptureFixture[str]) -> None:
    """Without space, lines are dropped whole and said so once; with space again they are written again."""
    with tmpfs(tmp_path, "size=8k"):
        log = MetricsLog(tmp_path / "m.jsonl", config, 1)
        longer_than_what_is_left = {f"value_{number}": 1 / 3 for number in range(100)}  # 3 kB
        for step in range(10):
            log.write(step=step, **longer_than_what_is_left)
        assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [0, 1]
        assert capfd.readouterr().err.count("No space left on device") == 1
        os.truncate(tmp_path / "m.jsonl", 0)
        log.write(step=100)
        assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [100]


def test_loads_of_experts_are_summed(tmp_path: Path) -> None:
    """Every so many steps there is a line with the tokens of each expert in them, and one at the end for the rest."""
    log = LoadsLog(tmp_path / "e.jsonl", load("tiny-moe", ["data.shards=/data", "metrics.experts_every=2"], {}))
    assert not (tmp_path / "e.jsonl").exists()
    measured = torch.zeros(2, LOADS + 3, dtype=torch.float64)
    measured[1, LOADS:] = torch.tensor([5, 3, 0])
    for step in (3, 4, 5, 6, 7):
        log.add(step, measured)
    log.write()
    log.write()
    found = [(line["step"], line["steps"], line["loads"]) for line in lines(tmp_path / "e.jsonl")]
    empty = [0, 0, 0]
    assert found == [(4, 2, [empty, [10, 6, 0]]), (6, 2, [empty, [10, 6, 0]]), (7, 1, [empty, [5, 3, 0]])]


# The lines of the trainer on the terminal.


def metrics(step: int, **values: Any) -> dict[str, Any]:
    usual = {"loss": 4.0, "z_loss": 0.0, "grad_norm": 0.8412, "lr": 3e-3, "step_s": 0.5, "tokens_per_s": 2000.0}
    return {"step": step, **usual, "mfu": None, **values}


def printed(*lines: dict[str, Any], every: int = 10, steps: int = 100, color: bool = False) -> list[str]:
    said: list[str] = []
    log = StepLines(every, steps, lambda: "1.0 GiB", say=said.append, color=color)
    for line in lines:
        log.note(line)
    return said


def test_the_first_step_every_tenth_and_the_last() -> None:
    """The first line of a start says at once that it trains; the last has no time left."""
    said = printed(*(metrics(step) for step in range(87, 101)))
    assert [line.split()[1] for line in said] == ["87/100", "90/100", "100/100"]
    assert "ETA 5.0 s" in said[1] and "ETA" not in said[2]
    assert printed(*(metrics(step) for step in range(20)), every=0) == []


def test_rates_are_those_since_the_line_before() -> None:
    """One slow step is seen in the line of its ten, and in no other."""
    said = printed(metrics(10), *(metrics(n, step_s=1.0, tokens_per_s=1000.0) for n in range(11, 21)), metrics(30))
    assert ["2,000 tokens/s" in said[0], "1,000 tokens/s" in said[1], "2,000 tokens/s" in said[2]] == [True] * 3


def test_the_whole_line() -> None:
    """Loss with the z-loss and the cross-entropy without it; MFU only if it is known; no escape codes."""
    line = printed(metrics(10, loss=4.25, z_loss=0.125, mfu=0.412))[0]
    assert line == (
        "step  10/100  loss 4.3750  cross-entropy 4.2500  grad norm 0.841  lr 3.00e-03  2,000 tokens/s  "
        "MFU 41.2%  memory 1.0 GiB"
    )


def test_what_is_not_finite_is_said_and_red_on_a_terminal() -> None:
    """None stands for what is not finite in the metrics."""
    assert "loss not finite  grad norm not finite" in printed(metrics(10, loss=None, grad_norm=None))[0]
    assert "\x1b[31mnot finite" in printed(metrics(10, loss=None), color=True)[0]


# The clock of CUDA events, with events that are complete when the test says so.


class FakeGpu:
    """``now`` in milliseconds; events recorded before ``reached`` are complete. Waiting is not possible."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = 0.0
        self.events = 0

    def event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self.at = gpu, -1.0

    def record(self) -> None:
        self.at = self._gpu.now

    def query(self) -> bool:
        return self.at <= self._gpu.reached

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query()
        assert end_event.query()
        return end_event.at - self.at


def compute(clock: GpuClock, gpu: FakeGpu, milliseconds: float) -> None:
    """A region in which the GPU works so long."""
    with clock.computing():
        gpu.now += milliseconds


def test_times_are_read_when_they_are_complete() -> None:
    """A step that the GPU has not finished has no time yet; it comes with a later step."""
    gpu = FakeGpu()
    clock = GpuClock(gpu.event)
    compute(clock, gpu, 30.0)
    compute(clock, gpu, 20.0)
    assert clock.take() == 0.0
    gpu.reached = gpu.now
    compute(clock, gpu, 70.0)
    assert clock.take() == 0.05
    gpu.reached = gpu.now
    assert clock.take() == 0.07
    assert clock.take() == 0.0


def test_events_are_used_again() -> None:
    """As many as are under way at once, however many steps there are."""
    gpu = FakeGpu()
    clock = GpuClock(gpu.event)
    for _ in range(100):
        compute(clock, gpu, 1.0)
        gpu.reached = gpu.now
        assert clock.take() == 0.001
    assert gpu.events == 2


def test_a_gpu_that_never_answers() -> None:
    """Does not make memory grow."""
    gpu = FakeGpu()
    gpu.reached = -2.0
    clock = GpuClock(gpu.event)
    for _ in range(1000):
        compute(clock, gpu, 1.0)
        assert clock.take() == 0.0
    assert gpu.events <= 2 * (MOST_PENDING + 2)
