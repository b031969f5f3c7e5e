"""Batch size and learning rate as published scaling laws have them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from opsd.trainer import counts
from opsd.trainer.model_settings import ModelSettings

SOURCES: Final = (
    "DeepSeek LLM, arXiv 2401.02954, 3.1 (from the FLOP of the run)",
    "Step Law, arXiv 2503.04715 (from parameters and tokens)",
)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Batch in tokens and peak of the learning rate, each from the smaller to the larger of the two laws."""

    batch: tuple[float, float]
    rate: tuple[float, float]


def suggest(model: ModelSettings, tokens: float) -> Suggestion:
    """What both laws say. They were fitted to runs far smaller than a month on hundreds of GPUs."""
    size = counts.active_parameters(model) - counts.embedding_parameters(model)
    flops = 6.0 * max(size, 1) * tokens
    batches = sorted((0.2920 * flops**0.3271, 0.58 * tokens**0.571))
    rates = sorted((0.3118 * flops**-0.1250, 1.79 * max(size, 1) ** -0.713 * tokens**0.307))
    return Suggestion((batches[0], batches[1]), (rates[0], rates[1]))
