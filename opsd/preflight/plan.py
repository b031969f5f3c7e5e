"""Predictions for a run from its configuration alone: memory, speed, time, checkpoints, interruptions. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from opsd.trainer.counts import embedding_parameters, flops_per_token, parameters

if TYPE_CHECKING:
    from opsd.trainer.config import Config

EXPECTED_MFU: Final = 0.30
"""That of SmolLM3's run on 384 H100s (its training notes); a single node is better."""

OVERHEAD: Final = (1.2, 1.3)
"""Wall-clock time over pure training time in real runs: restarts, checkpoints, evaluations, slow days."""

INTERRUPTIONS_PER_GPU_DAY: Final = 419 / 54 / 16_384
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100s (Dubey et al. 2024, section 3.3.4)."""

STALL_S: Final = 1.0
"""How long a checkpoint stops the training: the copy to memory; the rest is written in the background."""

FLOAT_BYTES: Final = 4
"""Of a weight, a gradient or a moment of the optimiser."""

LOGITS_BYTES: Final = 256 << 20
"""Of the logits that exist at a time, with as much for their gradient: ``PART_BYTES`` of ``opsd.trainer.loss``."""

ACTIVATION_BYTES: Final = {"none": 34, "selective": 16, "full": 2}
"""Per token, layer and channel in half precision (Korthikanti et al. 2022, equation 2 without attention scores)."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Predictions for a run on ``ranks`` devices. Times in seconds, sizes in bytes; None if the peak is unknown.

    ``memory`` is per device. ``stops`` are the expected interruptions, ``daly_s`` the optimal checkpoint interval (Daly
    2006).
    """

    ranks: int
    parameters: int
    memory: float
    checkpoint: int
    tokens: int
    step_tokens: int
    tokens_per_s: float | None
    step_s: float | None
    train_s: float | None
    interval_s: float | None
    stops: float | None
    daly_s: float

    @property
    def wall_s(self) -> tuple[float, float] | None:
        """Wall-clock time of the whole run, with the least and the greatest overhead of real runs."""
        return None if self.train_s is None else (self.train_s * OVERHEAD[0], self.train_s * OVERHEAD[1])


def state_values(config: Config) -> int:
    """Numbers in a checkpoint: parameters and moments, of which AdamW has two and Muon, for matrices of layers, one."""
    model = config.model
    count = parameters(model)
    embeddings = embedding_parameters(model)
    return 3 * count - (count - embeddings if config.optimizer.kind == "muon" else 0)


def memory_per_device(config: Config, ranks: int) -> float:
    """Bytes that training needs on one device, without allocator overhead."""
    model, parallel, data = config.model, config.parallel, config.data
    shards = max(1, ranks // parallel.replicas)
    tokens = max(shape.micro_batch * shape.sequence for shape in data.shapes) / (parallel.tp * parallel.cp)
    layers = model.layers / parallel.pp
    activations = tokens * layers * model.width * ACTIVATION_BYTES[parallel.recompute]
    if model.dtype == "float32":
        activations *= 2
    logits = 2 * min(LOGITS_BYTES, tokens * model.vocab * FLOAT_BYTES)
    projection = model.vocab * model.width * FLOAT_BYTES / parallel.tp
    return (parameters(model) + state_values(config)) * FLOAT_BYTES / shards + activations + logits + projection


def predict(config: Config, ranks: int) -> RunPlan:
    """What ``config`` will take on ``ranks`` devices."""
    count, peak = parameters(config.model), config.metrics.peak_flops
    data, rate = config.data, ranks * peak * EXPECTED_MFU
    step_tokens = data.batch * data.sequence
    speed = rate / flops_per_token(config.model, data.sequence) if peak else None
    flops = data.flops(config.run.steps, partial(flops_per_token, config.model))
    train_s = flops / rate if peak else None
    step_s = step_tokens / speed if speed else None
    mean_time_s = 86_400 / (ranks * INTERRUPTIONS_PER_GPU_DAY)
    return RunPlan(
        ranks=ranks,
        parameters=count,
        memory=memory_per_device(config, ranks),
        checkpoint=state_values(config) * FLOAT_BYTES,
        tokens=data.tokens(data.position(config.run.steps + 1)),
        step_tokens=step_tokens,
        tokens_per_s=speed,
        step_s=step_s,
        train_s=train_s,
        interval_s=_interval_s(config, step_s),
        stops=train_s * OVERHEAD[1] / mean_time_s if train_s else None,
        daly_s=_daly_s(mean_time_s),
    )


def _interval_s(config: Config, step_s: float | None) -> float | None:
    """Seconds between checkpoints, in whatever unit the configuration gives them."""
    settings = config.checkpoint
    if settings.minutes:
        return settings.minutes * 60
    if settings.mttf_hours:
        return _daly_s(settings.mttf_hours * 3600)
    return step_s * settings.every if step_s else None


def _daly_s(mean_time_s: float) -> float:
    """The optimal interval with one failure every ``mean_time_s`` (Daly 2006, equation 20, first order)."""
    return math.sqrt(2 * STALL_S * mean_time_s) - STALL_S
