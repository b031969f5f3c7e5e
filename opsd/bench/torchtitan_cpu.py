"""torchtitan's trainer on the CPU, which it does not support. Runs in ``.venv-torchtitan`` (``make torchtitan``).

``python -m opsd.bench.torchtitan_cpu SHAPE`` does a step for each line on standard input and prints an empty line.

torchtitan has one module-wide object for its device. Its replacement here uses torch.cpu and reports no memory. The
language models use flex or varlen attention, which cannot be trained on the CPU; here they use torchtitan's third kind,
scaled dot products. Everything else is unchanged.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torchtitan.tools import utils


class Cpu:
    """The part of ``torch.cuda`` that torchtitan uses."""

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
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the model and of a step: ``micro_batches`` of ``rows`` sequences of ``length`` tokens."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    length: int
    rows: int
    micro_batches: int


class RandomTokens(BaseDataLoader):
    """An endless stream of the same random tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """``vocab`` ids."""

        vocab: int

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self._vocab, self._shape = config.vocab, (local_batch_size, seq_len + 1)
        self._number = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            drawn = torch.randint(0, self._vocab, self._shape, generator=torch.Generator().manual_seed(self._number))
            self._number += 1
            yield {"input": drawn[:, :-1].contiguous()}, drawn[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._number = state.get("number", 0)


def configure(shape: Shape, folder: Path, steps: int) -> Trainer.Config:
    """Torchtitan's configuration of a Llama of ``shape`` with tied embeddings in float32, without recomputation."""
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    config = llama3_debugmodel()
    config.hf_assets_path = config.dump_folder = str(folder)
    config.model_spec.model = _model(shape)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=shape.vocab)
    config.dataloader = RandomTokens.Config(vocab=shape.vocab)
    config.training = replace(
        config.training, steps=steps, seq_len=shape.length, local_batch_size=shape.rows,
        global_batch_size=shape.rows * shape.micro_batches, mixed_precision_param="float32", disable_cuda_graphs=True,
    )  # fmt: skip
    config.activation_checkpoint = None
    config.validator.enable = False
    return config


def _model(shape: Shape) -> Any:
    normal = {"weight": torch.nn.init.ones_}
    rope = ComplexRoPE.Config(dim=shape.width // shape.heads, max_seq_len=shape.length, theta=50_000)
    layers = llama3._build_llama3_layers(
        n_layers=shape.layers, dim=shape.width, n_heads=shape.heads, n_kv_heads=shape.kv_heads, hidden_dim=shape.ffn,
        rope=rope, attn_backend="flex",
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    head = Linear.Config(
        in_features=shape.width, out_features=shape.vocab, param_init=llama3._output_linear_init(shape.width)
    )
    embedding = Embedding.Config(
        num_embeddings=shape.vocab, embedding_dim=shape.width, param_init=llama3._EMBEDDING_SKIP_INIT
    )
    norm = RMSNorm.Config(normalized_shape=shape.width, param_init=normal)
    return llama3.Llama3Model.Config(
        dim=shape.width, vocab_size=shape.vocab, enable_weight_tying=True, tok_embeddings=embedding, norm=norm,
        lm_head=head, layers=layers,
    )  # fmt: skip


def main() -> None:
    """Do a step for each line on standard input."""
    answers = os.dup(1)
    os.dup2(2, 1)  # keeps torchtitan's output apart from the answers
    os.environ.update(ALONE)
    with tempfile.TemporaryDirectory() as folder:
        config = configure(Shape(**json.loads(sys.argv[1])), Path(folder), steps=10_000)
        config.metrics.log_freq = 10_000
        config.checkpoint.enable = False
        trainer = Trainer(config)
        batches = trainer.batch_generator(trainer.dataloader)
        for _ in sys.stdin:
            trainer.step += 1
            trainer.train_step(batches)
            os.write(answers, b"\n")
        trainer.close()


if __name__ == "__main__":
    main()
