"""The trainer on a GPU: its kernels agree with the plain one. And, anywhere, what measures it works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opsd.trainer.attention import attend, attention_inputs
from opsd.trainer.model_settings import ModelSettings

sys.path.insert(0, str(Path(__file__).parent))
from measure import measure, summary

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
SETTINGS = ModelSettings(layers=1, width=256, heads=4, kv_heads=2, ffn=8, vocab=8)


@pytest.mark.parametrize("values", [64, 48])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("kernel", [pytest.param("varlen", marks=needs_gpu), pytest.param("flex", marks=needs_gpu)])
def test_kernels_agree(kernel: str, window: int, values: int) -> None:
    """Attention and its gradients are those of the masked kernel, up to bfloat16, with smaller heads of values too."""
    device = torch.device("cuda")
    documents = torch.sort(torch.randint(0, 6, (2, 1024), device=device)).values.int()
    results = []
    for name in ("sdpa", kernel):
        torch.manual_seed(0)
        shapes = [(2, heads, 1024, channels) for heads, channels in ((4, 64), (2, 64), (2, values))]
        q, k, v = (torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
        changed = SETTINGS.model_copy(update={"attention": name, "window": window})
        y = attend(q, k, v, attention_inputs(documents, changed).masks[changed.kinds[0]], None, 0.125)
        y.square().sum().backward()
        results.append([y, q.grad, k.grad, v.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


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


@pytest.mark.slow
def test_the_measurement_runs() -> None:
    """The same cases on the CPU, with the smallest preset: every number is there."""
    settings = {"run.device": "cpu", "run.threads": 1, "data.batch": 2, "data.sequence": 64, "data.verify": "size"}
    results = measure("tiny", 4, 1, settings, documents=30)
    assert results["ours_causal_tokens_per_s"] > 0
    assert results["ours_document_mask_checkpoint_stall_s"] > 0
    assert 0 < results["ratio_z_loss_to_none"] < 100
    assert results["torch"] == torch.__version__


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    """`make bench-gpu` says so and fails."""
    done = subprocess.run([sys.executable, Path(__file__).parent / "measure.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no GPU here; nothing was measured" in done.stderr
