"""Small corpora of token shards."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict
from pathlib import Path

from opsd.checkpoints.manifest import FileEntry, checksum

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
