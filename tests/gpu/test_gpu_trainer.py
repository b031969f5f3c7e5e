"""The trainer on a GPU: its kernels agree with the plain one. And, anywhere, what measures it works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from opsd.calibration.read import bench_figures
from opsd.plan.hardware import hardware_of
from opsd.plan.layout import Layout
from opsd.plan.memory import memory_of
from opsd.plan.source import read
from opsd.trainer.attention import attend, attention_inputs
from opsd.trainer.model_settings import ModelSettings

sys.path.insert(0, str(Path(__file__).parent))
from measure import measure, overrides, summary
from shapes import ON_GPU, PARTS, PRESET, Part
from turns import in_turns

ON_CPU = {
    "run.device": "cpu", "run.threads": 1, "data.batch": 2, "data.micro_batch": 2, "data.verify": "size",
    "model.dtype": "float32", "model.document_mask": "false", "tracking.tensorboard": "false",
    "parallel.recompute": "selective",
}  # fmt: skip
ALWAYS_SMALL = {
    "model.layers": 4, "model.width": 32, "model.heads": 4, "model.kv_heads": 2, "model.ffn": 64, "model.vocab": 2048,
    "data.sequence": 64,
}  # fmt: skip
SMALL = ALWAYS_SMALL | {
    "checkpoint.every": 5, "model.kv_heads": 4, "model.experts": 8, "model.experts_per_token": 2,
    "model.expert_ffn": 16, "model.state_heads": 4, "model.state_key_heads": 2, "model.state_key_dim": 16,
    "model.state_value_dim": 16,
}  # fmt: skip
SETTINGS = ModelSettings(layers=1, width=256, heads=4, kv_heads=2, ffn=8, vocab=8)


WITHIN = 2.0
"""A kernel may be this many times as far from float32 as the plain one: the bound of FlashAttention's own tests."""


def attended(kernel: str, window: int, values: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Attention of drawn bfloat16 inputs with ``kernel``, and its three gradients, in ``dtype``."""
    torch.manual_seed(0)
    documents = torch.sort(torch.randint(0, 6, (2, 1024), device=device)).values.int()
    shapes = [(2, heads, 1024, channels) for heads, channels in ((4, 64), (2, 64), (2, values))]
    drawn = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    q, k, v = (x.to(dtype).requires_grad_() for x in drawn)
    changed = SETTINGS.model_copy(update={"attention": kernel, "window": window})
    y = attend(q, k, v, attention_inputs(documents, changed).masks[changed.kinds[0]], None, 0.125)
    y.square().sum().backward()
    return [y.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def farthest(kernel: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """How many times as far from ``exact`` as ``plain`` it is: the worst tensor, by norm and by largest element."""
    ratios = [1.0]
    for one, other, right in zip(kernel, plain, exact, strict=True):
        for size in (torch.linalg.vector_norm, lambda x: x.abs().max()):
            ratios.append(float(size(one.float() - right) / size(other.float() - right)))
    return max(ratios)


@pytest.mark.parametrize("values", [64, 48])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("kernel", ["varlen", "flex"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_kernels_agree(kernel: str, window: int, values: int) -> None:
    """Attention and its gradients are as near to float32 as the masked kernel's, with smaller heads of values too."""
    found = attended(kernel, window, values, torch.bfloat16, "cuda")
    plain, exact = (attended("sdpa", window, values, dtype, "cuda") for dtype in (torch.bfloat16, torch.float32))
    assert farthest(found, plain, exact) < WITHIN


def test_a_window_that_is_one_token_off_is_found() -> None:
    """The bound tells a wrong mask from rounding."""
    plain, exact = (attended("sdpa", 100, 48, dtype, "cpu") for dtype in (torch.bfloat16, torch.float32))
    assert farthest(plain, plain, exact) == 1.0
    assert farthest(attended("sdpa", 101, 48, torch.bfloat16, "cpu"), plain, exact) > 2 * WITHIN


def test_summary_leaves_out_what_compiles_and_what_saves() -> None:
    """The first steps and those that save do not count for the speed; the longest stall is kept."""
    lines = [
        {"tokens_per_s": rate, "mfu": rate / 100, "data_s": 0.1, "step_s": 2.0, "checkpoint_s": stall}
        for rate, stall in [(1, 0.0), (10, 0.0), (20, 0.0), (5, 0.7), (30, 0.0)]
    ]
    numbers = summary(lines, skipped=1)
    assert numbers["tokens_per_s"] == 20
    assert numbers["mfu"] == pytest.approx(0.2)
    assert numbers["data_share"] == pytest.approx(0.05)
    assert numbers["checkpoint_stall_s"] == 0.7


def shrunk(part: Part) -> Part:
    """The part with every size made small, and nothing else changed."""
    settings = {name: SMALL.get(name, value) for name, value in part.settings.items()}
    return Part(part.what, {**ALWAYS_SMALL, **settings}, 6, 100.0)


@pytest.mark.slow
def test_the_measurement_runs(tmp_path: Path) -> None:
    """Every part on the CPU, its shape made small: every number is there, and a plan reads the first."""
    parts = {name: shrunk(part) for name, part in PARTS.items()}
    parts["broken"] = Part("heads that do not divide the width", {**ALWAYS_SMALL, "model.heads": 3}, 6, 100.0)
    parts["late"] = replace(parts["broken"], seconds=-1000.0)
    *_, results = measure(parts, ON_CPU, skipped=1, documents=30)
    found = results["parts"]
    for name in PARTS:
        assert found[name]["steps"] == 6, found[name]
        assert found[name]["tokens_per_s"] > 0
        assert (found[name]["checkpoint_stall_s"] is not None) == (name == "dense_4k")
    assert found["moe"]["active_parameters"] < found["moe"]["parameters"]
    assert "model.heads" in found["broken"]["skipped"]
    assert found["late"]["skipped"] == "its time was up in step 1"
    assert results["torch"] == torch.__version__
    of_gpu = results | {"gpu": "NVIDIA H100 80GB HBM3"}
    evidence = bench_figures(tmp_path / "result.json", of_gpu, "h100", hardware_of("h100"))
    assert [figure.name for figure in evidence] == ["loop", "data", "stall"]


def test_a_part_without_memory_has_half_the_batch() -> None:
    """As often as it takes; where one sequence is too much the part is skipped, and the next is measured."""
    line = {"tokens_per_s": 10.0, "mfu": 0.1, "data_s": 0.1, "step_s": 1.0, "checkpoint_s": 0.0}

    def run(settings: Mapping[str, object], _folder: Path, steps: int, _until: float) -> tuple[list[Any], str]:
        if int(str(settings["data.batch"])) * int(str(settings["data.sequence"])) > 128:
            return [line], "memory 79.0 of 79.1 GiB\ntorch.OutOfMemoryError: CUDA out of memory."
        return [line] * steps, "memory 61.5 of 79.1 GiB"

    parts = {str(length): Part("", {**ALWAYS_SMALL, "data.sequence": length}, 6, 100.0) for length in (256, 64)}
    *_, results = measure(parts, ON_CPU | {"data.batch": 4}, skipped=1, documents=30, run=run)
    assert results["parts"]["256"]["skipped"] == "out of memory in step 2"
    assert results["parts"]["64"]["settings"]["data.batch"] == 2
    assert results["parts"]["64"]["memory_gib"] == 61.5


def test_the_parts_fit_nine_minutes() -> None:
    """With ten seconds to spare."""
    assert sum(part.seconds for part in PARTS.values()) <= 530


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_fit_an_h100(name: str) -> None:
    """By what a plan predicts of the memory of one."""
    config = read(PRESET, overrides(ON_GPU | PARTS[name].settings), None, 1)
    assert memory_of(config, Layout.of(config), 1).total < hardware_of("h100").memory.value


def test_the_burn_and_torch_take_turns() -> None:
    """On the CPU, whose products are small: both are measured."""
    ours, plain = in_turns(torch.device("cpu"), 0.4, turns=2)
    assert ours > 0
    assert plain > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    """`make bench-gpu` says so and fails."""
    done = subprocess.run([sys.executable, Path(__file__).parent / "measure.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no GPU here; nothing was measured" in done.stderr
