"""What ``make bench-gpu`` measures, part after part: the settings that differ from those of the preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PRESET: Final = "smollm3-3b"
ON_GPU: Final[dict[str, object]] = {
    "run.device": "cuda", "data.micro_batch": 2, "data.batch": 2, "parallel.compile": "true",
    "parallel.recompute": "selective", "model.document_mask": "false",
}  # fmt: skip
"""One micro-batch a step: a sum over several would be kept as a second set of float32 gradients."""
OLMOE: Final[dict[str, object]] = {
    "model.layers": 8, "model.width": 2048, "model.heads": 16, "model.kv_heads": 16, "model.qk_norm": "true",
    "model.qk_norm_over": "all", "model.nope_every": 0, "model.rope_theta": 10_000.0, "model.ffn": 1024,
    "model.experts": 64, "model.experts_per_token": 8, "model.expert_ffn": 1024, "model.vocab": 50_304,
    "model.tied": "false", "optimizer.balance_loss": 0.01, "optimizer.router_z_loss": 0.001,
}  # fmt: skip
HYBRID: Final[dict[str, object]] = {
    "model.layers": 24, "model.width": 2048, "model.ffn": 5632,
    "model.pattern": '["mamba", "delta", "delta", "global"]', "model.state_heads": 32, "model.state_key_heads": 16,
    "model.state_key_dim": 128, "model.state_value_dim": 128, "parallel.compile": "false",
}  # fmt: skip
"""Not compiled: the loop over the chunks of a sequence would be unrolled, which alone can take the part's time."""


@dataclass(frozen=True, slots=True)
class Part:
    """One run of the trainer. ``seconds`` is its share of the time, which what earlier parts leave is added to."""

    what: str
    settings: Mapping[str, object]
    steps: int
    seconds: float


PARTS: Final = {
    "dense_4k": Part(
        "3 B dense at 4096 tokens, attention over whole sequences, one checkpoint",
        {"data.sequence": 4096, "checkpoint.every": 39},
        40,
        140,
    ),
    "dense_32k": Part(
        "3 B dense at 32,768 tokens, all activations recomputed",
        {"data.sequence": 32_768, "data.micro_batch": 1, "data.batch": 1, "parallel.recompute": "full"},
        14,
        120,
    ),
    "moe": Part(
        "the shape of OLMoE (1.3 B active of 6.9 B) with 8 of its 16 layers: float32 weights, gradients and moments "
        "of all 16 take 16 bytes a parameter, 111 GB",
        OLMOE,
        40,
        90,
    ),
    "hybrid": Part(
        "1.8 B: of four layers one of Mamba-2, two of gated DeltaNet, one of attention; not compiled",
        HYBRID,
        30,
        110,
    ),
    "dense_4k_documents": Part(
        "as dense_4k, each token seeing its own document",
        {"data.sequence": 4096, "model.document_mask": "true"},
        30,
        70,
    ),
}
"""In the order of their worth: 530 of the 540 seconds. What a plan reads is ``dense_4k``."""
