"""Figures from what ``make bench-gpu`` has written: one GPU, the trainer's own steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from opsd.calibration.evidence import Evidence, NotUsable
from opsd.plan.hardware import Hardware, is_kind
from opsd.plan.layout import Layout
from opsd.plan.source import read
from opsd.plan.step_time import step_time
from opsd.trainer import counts
from opsd.trainer.config import Config, ConfigError

_PART = "dense_4k"
"""With attention over whole sequences, as a plan counts it."""


def figures_of(path: Path, told: Mapping[str, Any], gpu: str, hardware: Hardware) -> Iterator[Evidence]:
    """What a step loses beside its kernels, waiting for data, and a checkpoint's stall. Raises NotUsable."""
    try:
        part = told["parts"][_PART]
        if why := part.get("skipped"):
            raise NotUsable(f"{path} has no speed: {_PART} was skipped, {why}; run make bench-gpu again")
        preset, model = str(part["preset"]), str(told["gpu"])
        settings: Mapping[str, object] = part["settings"]
        at = datetime.fromisoformat(told["date"]).timestamp()
        speed, data = float(part["tokens_per_s"]), float(part["data_share"])
        stall = None if part["checkpoint_stall_s"] is None else float(part["checkpoint_stall_s"])
        config = read(preset, [f"{name}={value}" for name, value in settings.items()], None, 1)
    except NotUsable:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise NotUsable(f"{path} is no result of make bench-gpu of this release; run it again") from error
    if not is_kind(gpu, model):
        raise NotUsable(f"{path} was measured on one {model}, and the plan is for {gpu}: give that --gpu")
    mfu = speed * counts.flops_per_token(config.model, config.data.sequence) / hardware.peak.value
    if not 0 < mfu < 1:
        raise NotUsable(f"{path}: {speed:,.0f} tokens/s would be {mfu:.0%} of the GPU's peak; run make bench-gpu again")
    name = f"make bench-gpu, {preset} on one GPU"
    yield Evidence("loop", _loop(config, speed, hardware), f"{name}, {speed:,.0f} tokens/s", path, at)
    yield Evidence("data", data / (1 - data) if data < 1 else 1.0, name, path, at)
    if stall is not None:
        yield Evidence("stall", stall, name, path, at)


def _loop(config: Config, tokens_per_s: float, hardware: Hardware) -> float:
    """The figure with which a plan predicts this speed on one GPU, where nothing is sent."""
    predicted = step_time(config, Layout.of(config), 1, hardware)
    busy = predicted.total - predicted.optimizer
    took = config.data.batch * config.data.sequence / tokens_per_s
    return hardware.loop.value * busy / max(took - predicted.optimizer, 1e-9)
