"""Shards that a pipeline writes: the trainer's own bits, and refused where they are not what they say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.data.pipeline import PipelineError
from opsd.trainer.data.shards import Corpus, DataError, open_corpus, read_index, verify
from opsd.trainer.data.sources import open_sources
from opsd.trainer.data.tokenize import train_tokenizer
from opsd.trainer.data_settings import DataSettings
from tests.fakes.pipelines import Here, contents, run_here

PIPELINE = """
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from opsd.data.shards import ShardIndex, ShardWriter

stages = [
    LocalPipelineExecutor(
        [JsonlReader("FOLDER/raw"), ShardWriter("FOLDER/corpus", "FOLDER/tokenizer.json", shard_tokens=300)],
        tasks=TASKS,
    ),
    LocalPipelineExecutor([ShardIndex("FOLDER/corpus")]),
]
"""
TEXTS = [f"Der {number}. Text über {'Zahlen ' * (number % 9)}und Wörter. 𝄞" for number in range(120)]


def make(folder: Path, texts: list[str], tasks: int, files: int = 4) -> Path:
    """A pipeline over ``texts``; files have documents in their order."""
    (folder / "raw").mkdir(parents=True)
    size = -(-len(texts) // files) or 1
    for number in range(files):
        lines = [json.dumps({"text": text, "id": "x"}) + "\n" for text in texts[number * size : (number + 1) * size]]
        (folder / f"raw/{number}.jsonl").write_text("".join(lines))
    train_tokenizer(TEXTS, 400).save(str(folder / "tokenizer.json"))
    file = folder / "pipeline.py"
    file.write_text(PIPELINE.replace("FOLDER", str(folder)).replace("TASKS", str(tasks)))
    return file


def by_trainer(folder: Path, *files: Path) -> Path:
    """The corpus that ``python -m opsd.trainer.data`` makes of these files."""
    subprocess.run(
        [sys.executable, "-m", "opsd.trainer.data", *map(str, files), "--out", str(folder / "own"), "--tokenizer",
         str(folder / "tokenizer.json"), "--shard-tokens", "300", "--workers", "1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder / "own"


def test_one_task_writes_the_files_of_the_trainer(tmp_path: Path) -> None:
    """Tokens, documents, tokenizer: bit for bit, by the same names; a second run writes nothing."""
    file = make(tmp_path, TEXTS, tasks=1)
    assert run_here(file)
    own = by_trainer(tmp_path, tmp_path / "raw")
    corpus, trainers = contents(tmp_path / "corpus"), contents(own)
    assert len(trainers) > 10
    for name in trainers.keys() - {"index.json"}:
        assert corpus[name] == trainers[name]
    ours, theirs = read_index(tmp_path / "corpus"), read_index(own)
    assert (ours.shards, ours.tokenizer, ours.framing) == (theirs.shards, theirs.tokenizer, theirs.framing)
    assert ours.read is not None
    assert theirs.read is not None
    assert ours.read.documents == theirs.read.documents == len(TEXTS)
    verify(tmp_path / "corpus", ours, content=True)
    engine = Here()
    assert run_here(file, engine)
    assert engine.ran == []


@settings(max_examples=5)
@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=60), st.integers(2, 4))
def test_several_tasks_write_the_tokens_of_their_files(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], tasks: int
) -> None:
    """Task by task, as the trainer tokenises the files that a task has."""
    folder = tmp_path_factory.mktemp("several")
    assert run_here(make(folder, texts, tasks))
    index = read_index(folder / "corpus")
    verify(folder / "corpus", index, content=True)
    files = sorted((folder / "raw").iterdir())
    order = [path for rank in range(tasks) for path in files[rank::tasks]]
    lines = [json.loads(line)["text"] for path in order for line in path.read_text().splitlines()]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    wanted = [id_ for text in lines for id_ in [0, *tokenizer.encode(text, add_special_tokens=False).ids]]
    stored = [np.fromfile(folder / "corpus" / shard.token_file.name, index.dtype) for shard in index.shards]
    assert np.concatenate(stored).tolist() == wanted


def test_shards_of_a_task_that_are_missing_are_named(tmp_path: Path) -> None:
    """The index is not made over what is left."""
    file = make(tmp_path, TEXTS, tasks=2)

    def lose(number: int) -> None:
        if number == 2:
            (tmp_path / "corpus/part-00001.json").unlink()

    said: list[str] = []
    assert not run_here(file, Here(lose), said=said)
    assert "has the shards of 1 tasks, of 2" in said[-1]
    with pytest.raises(PipelineError, match=r"part-00001\.json is missing"):
        run_here(file)


def test_the_turns_of_chats_are_tokens_and_their_template_is_known(tmp_path: Path) -> None:
    """Marks of a template are one token each only in shards of chats; a run that names another template is refused."""
    marked = "<|turn|>user\nHallo<|turn|>assistant\nTag"
    file = make(tmp_path, [f"{marked} {number}" for number in range(30)], tasks=2)
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.add_special_tokens(["<|turn|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    turn = int(tokenizer.token_to_id("<|turn|>") or 0)
    assert run_here(file)
    assert first_tokens(open_corpus(tmp_path / "corpus", None, 20)).count(turn) == 0
    template = tmp_path / "chat_template.jinja"
    template.write_text("{% for each in messages %}<|turn|>{{ each.role }}\n{{ each.content }}{% endfor %}")
    file.write_text(file.read_text().replace("shard_tokens=300", f"shard_tokens=300, chat_template='{template}'"))
    assert run_here(file, redo=True)
    assert first_tokens(open_corpus(tmp_path / "corpus", None, 20)).count(turn) == 2

    def opened(template: Path) -> None:
        shards = str(tmp_path / "corpus")
        data = DataSettings(shards=shards, chat_template=str(template), sequence=20, batch=2, micro_batch=1)
        open_sources(data, 1000)

    opened(template)
    shutil.copy(template, tmp_path / "other.jinja")
    with open(tmp_path / "other.jinja", "a") as other:
        other.write("<|turn|>")
    with pytest.raises(
        DataError, match=r"corpus have been rendered with another chat template than data\.chat_template"
    ):
        opened(tmp_path / "other.jinja")


def first_tokens(corpus: Corpus) -> list[int]:
    tokens, documents = np.empty((1, 21), np.int64), np.empty((1, 20), np.int32)
    corpus.read([0], tokens, documents)
    found: list[int] = tokens[0].tolist()
    return found
