"""torchtitan on the CPU, which it does not know: ``python torchtitan_cpu.py FOLDER STEPS`` trains a small Llama.

torchtitan asks one module-wide object about its device. What stands in for it here knows torch.cpu and has no memory to
tell of; everything else is the real library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torchtitan.tools import utils


class Cpu:
    """What torchtitan asks of ``torch.cuda``."""

    total_memory = 1 << 34

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: torch.device) -> str:
        return "cpu"

    def get_device_properties(self, device: torch.device) -> Cpu:
        return self

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {}

    def current_device(self) -> int:
        return 0

    def reset_peak_memory_stats(self) -> None: ...
    def empty_cache(self) -> None: ...


utils.device_type, utils.device_module = "cpu", Cpu()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class RandomTokens(BaseDataLoader):
    """Two rows of 64 tokens, without end."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(self, config: Config, **_: Any) -> None:
        self._number = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            drawn = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(self._number))
            self._number += 1
            yield {"input": drawn[:, :-1].contiguous()}, drawn[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._number = state.get("number", 0)


def small(folder: Path, steps: int) -> Trainer.Config:
    """A configuration of torchtitan's debug model that saves every third step below ``folder``."""
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:  # flex and varlen have no backward on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path = config.dump_folder = str(folder)
    config.dataloader = RandomTokens.Config()
    config.training = replace(
        config.training, steps=steps, seq_len=64, local_batch_size=2, global_batch_size=4, disable_cuda_graphs=True
    )
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    config.validator.enable = False
    return config


if __name__ == "__main__":
    from opsd.adapters.torchtitan import RankPageTrainer

    here = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(here)
    trainer = RankPageTrainer(small(Path(sys.argv[1]), int(sys.argv[2])))
    trainer.train()
    trainer.close()
