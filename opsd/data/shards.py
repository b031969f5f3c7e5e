"""Steps of datatrove that write the trainer's shards: the same tokens as ``python -m opsd.trainer.data`` makes.

``ShardWriter`` ends the pipeline of a stage. A stage of one task with ``ShardIndex`` alone follows it, and makes the
corpus exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from datatrove.io import DataFolderLike, get_datafolder
from datatrove.pipeline.base import PipelineStep

from opsd import durable
from opsd.checkpoints.manifest import checksum
from opsd.trainer.data.shards import TOKENIZER, DataError, Framing, Tally, parse_shard
from opsd.trainer.data.texts import EMPTY, encodable
from opsd.trainer.data.tokenize import commit_corpus, framing_of, load_tokenizer, write_shards

SHARD_TOKENS: Final = 100_000_000


class ShardWriter(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Tokenises documents into shards of about ``shard_tokens`` tokens; it passes no document on.

    ``tokenizer`` is the path of a tokenizer.json, ``separator`` as for ``python -m opsd.trainer.data``. Documents
    without a text are counted as dropped, as there. ``chat_template`` is the Jinja file with which an earlier step has
    rendered chats to texts: the index has its checksum, and special tokens in the texts are tokens.
    """

    name = "shards"
    type = "WRITER"

    def __init__(
        self,
        output_folder: DataFolderLike,
        tokenizer: str,
        separator: str = "",
        shard_tokens: int = SHARD_TOKENS,
        chat_template: str = "",
    ) -> None:
        super().__init__()
        self.output_folder = get_datafolder(output_folder)
        self.tokenizer, self.separator, self.shard_tokens = tokenizer, separator, shard_tokens
        self.chat_template = chat_template

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Raises DataError, OSError."""
        tokenizer = load_tokenizer(Path(self.tokenizer))
        framing = framing_of(tokenizer, Path(self.tokenizer), self.separator)
        if self.chat_template:
            framing = replace(framing, template=checksum(Path(self.chat_template)))
        folder, tally = Path(self.output_folder.path), Tally()
        folder.mkdir(parents=True, exist_ok=True)
        name, texts = f"shard-{rank:05d}", self._texts(data or (), tally)
        shards = write_shards(texts, tokenizer, framing, folder, self.shard_tokens, name)
        part = {
            "tasks": world_size, "tokenizer": tokenizer.to_str(pretty=True), "framing": asdict(framing),
            "shards": [asdict(shard) for shard in shards], "read": asdict(tally),
        }  # fmt: skip
        durable.replace(folder / f"part-{rank:05d}.json", json.dumps(part).encode())

    def _texts(self, documents: Any, tally: Tally) -> Iterator[str]:
        for document in documents:
            if text := encodable(document.text or "", tally):
                tally.documents += 1
                self.stat_update("total")
                yield text
            else:
                tally.drop(EMPTY)


class ShardIndex(PipelineStep):  # type: ignore[misc]
    """Makes the corpus exist, once all tasks with ``ShardWriter`` have written their shards to ``folder``."""

    name = "index of shards"
    type = "WRITER"
    in_place = True
    """It reads and writes the same folder."""

    def __init__(self, folder: DataFolderLike) -> None:
        super().__init__()
        self.shards_folder, self.output_folder = get_datafolder(folder), get_datafolder(folder)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Raises DataError, OSError."""
        if world_size != 1:
            raise DataError("the stage with ShardIndex has one task")
        source, target = Path(self.shards_folder.path), Path(self.output_folder.path)
        parts = [json.loads(path.read_bytes()) for path in sorted(source.glob("part-*.json"))]
        if not parts or any(part["tasks"] != len(parts) for part in parts):
            wanted = parts[0]["tasks"] if parts else "some"
            raise DataError(
                f"{source} has the shards of {len(parts)} tasks, of {wanted}: run the stage with ShardWriter"
            )
        if any((part["tokenizer"], part["framing"]) != (parts[0]["tokenizer"], parts[0]["framing"]) for part in parts):
            raise DataError(
                f"the tasks that wrote to {source} had different tokenizers or chat templates: run them again"
            )
        read = Tally()
        for part in parts:
            read.add(Tally.parse(part["read"]))
        target.mkdir(parents=True, exist_ok=True)
        durable.replace(target / TOKENIZER, parts[0]["tokenizer"].encode())
        framing = Framing.parse(parts[0]["framing"])
        shards = [parse_shard(entry) for part in parts for entry in part["shards"]]
        commit_corpus(target, load_tokenizer(target / TOKENIZER), framing, shards, read)
