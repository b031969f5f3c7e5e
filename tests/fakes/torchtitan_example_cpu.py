"""The example for torchtitan on the CPU, made smaller: run as a program it is ``opsd.adapters.torchtitan``."""

from __future__ import annotations

from dataclasses import replace

from opsd.bench import torchtitan_cpu  # noqa: F401 -- first: it tells torchtitan what a CPU is

import torchtitan_llama  # isort: skip
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

from opsd.adapters.torchtitan import main


def small() -> Trainer.Config:
    """The example's configuration; attention of the debug model cannot be trained on the CPU."""
    config = torchtitan_llama.small()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training = replace(
        config.training, steps=30, seq_len=32, local_batch_size=1, mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )  # fmt: skip
    config.checkpoint.interval = 10
    config.activation_checkpoint, config.validator.enable = None, False
    return config


if __name__ == "__main__":
    main()
