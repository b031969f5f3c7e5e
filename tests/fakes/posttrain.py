"""Tiny tokenizers, models, data sets and corpora of token shards.

Tiny tokenizers, models and data sets for tests of post-training.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from opsd.checkpoints.manifest import FileEntry, checksum

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same with the marks that TRL needs for assistant_only_loss."""
SPECIAL = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|user|>"]


def byte_tokenizer(template: str | None = CHATML, **changes: Any) -> transformers.PreTrainedTokenizerFast:
    """A token for each byte, and special ones: 262 in all. Text comes back as it was."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*SPECIAL, *letters])}
    inner = Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    settings: dict[str, Any] = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<|im_end|>"} | changes
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **settings)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # the default of transformers 5
    return tokenizer


def tiny_llama(**changes: Any) -> transformers.LlamaForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": 262, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048,
    } | changes  # fmt: skip
    transformers.set_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


PLACES = ("harbour", "mountain", "library", "station", "garden", "museum", "bridge", "market", "valley", "forest")
THINGS = ("clock", "lantern", "bicycle", "violin", "compass", "kettle", "ladder", "mirror", "anchor", "carpet")


class Writer:
    """Texts that differ from each other; the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._count = 0

    def question(self) -> str:
        self._count += 1
        place, thing = self._draw.choice(PLACES), self._draw.choice(THINGS)
        return f"Question {self._count}: where in the {place} did they leave the {thing}?"

    def answer(self) -> str:
        self._count += 1
        place, thing = self._draw.choice(PLACES), self._draw.choice(THINGS)
        return f"Answer {self._count}: the {thing} stands behind the door of the {place}."

    def system(self) -> str:
        return f"You guide visitors through the {self._draw.choice(PLACES)}, politely and in short sentences."

    def chat(self, turns: int = 1, *, system: bool = True) -> list[dict[str, str]]:
        found = [message("system", self.system())] if system else []
        for _ in range(turns):
            found += [message("user", self.question()), message("assistant", self.answer())]
        return found


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# Small corpora of token shards.


SHARD = 40_000


def make_corpus(folder: Path, *, shards: int = 3, seed: int = 0) -> int:
    """A corpus as `python -m opsd.trainer.data` makes it, other content for each ``seed``; the bytes of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)

    def file(name: str, size: int) -> dict[str, object]:
        (folder / name).write_bytes(rng.randbytes(size))
        sha256 = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        return {**asdict(FileEntry(name, size, checksum(folder / name))), "sha256": sha256}

    described = [
        {
            "tokens": SHARD // 2,
            "documents": 10,
            "token_file": file(f"shard-{number:05d}.tokens", SHARD),
            "document_file": file(f"shard-{number:05d}.documents", 80),
        }
        for number in range(shards)
    ]
    index = {"vocab": 1000, "dtype": "uint16", "tokenizer": file("tokenizer.json", 500), "shards": described}
    (folder / "index.json").write_text(json.dumps({**index, "format": 1}))
    return shards * (SHARD + 80) + 500
