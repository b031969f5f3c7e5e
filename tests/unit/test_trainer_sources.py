"""Finding and checking the corpora of a run: several sources, a copy on slower storage, one tokenizer."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opsd.trainer.data.shards import (
    DOCUMENT,
    INDEX,
    TOKENIZER,
    DataError,
    describe,
    open_corpus,
    read_index,
    write_index,
)
from opsd.trainer.data.sources import made_differently, open_sources, sizes
from opsd.trainer.data.tokenize import add_separator, load_tokenizer, make_corpus, train_tokenizer
from opsd.trainer.data_settings import DataSettings, StageSettings

TEXTS = {name: [f"{name} number {i} of many words\n" * (i % 3 + 1) for i in range(40)] for name in ("web", "code")}
LENGTH = 16


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two corpora, web and code, made with the same tokenizer."""
    folder = tmp_path / "shards"
    tokenizer = train_tokenizer([text for texts in TEXTS.values() for text in texts], 290)
    for name, texts in TEXTS.items():
        make_corpus(texts, tokenizer, folder / name, shard_tokens=300)
    return folder


def data(shards: Path, **more: object) -> DataSettings:
    stages = (StageSettings(start=1, weights={"web": 0.5, "code": 0.5}),)
    return DataSettings(shards=str(shards), sequence=LENGTH, batch=4, micro_batch=2, stages=stages, **more)


def refusal(settings: DataSettings, vocab: int = 1000) -> str:
    with pytest.raises(DataError) as error:
        open_sources(settings, vocab)
    return str(error.value)


def test_every_source_is_a_corpus_of_its_name(shards: Path) -> None:
    """The sources of all stages are found below data.shards; without stages the folder itself is the corpus."""
    sources = open_sources(data(shards), 1000)
    assert sorted(sources) == ["code", "web"]
    assert min(sizes(sources, data(shards)).values()) > 10
    alone = open_sources(DataSettings(shards=str(shards / "web"), sequence=LENGTH, batch=4, micro_batch=2), 1000)
    assert alone["."].index == sources["web"].index


@pytest.mark.parametrize("lost", ["begin", "half"])
def test_documents_that_do_not_begin_as_the_index_says_are_refused(shards: Path, lost: str) -> None:
    """Shards without their separators, as of a tokeniser that has dropped them; their checksums are right."""
    index, folder = read_index(shards / "web"), shards / "web"
    changed = []
    for number, shard in enumerate(index.shards):
        path, starts = folder / shard.token_file.name, np.fromfile(folder / shard.document_file.name, np.uint64)
        tokens = np.fromfile(path, index.dtype)
        tokens[starts[number % 2 :: 2] if lost == "half" else starts] = 5
        tokens.tofile(path)
        changed.append(replace(shard, token_file=describe(path)))
    write_index(folder, replace(index, shards=tuple(changed)))
    told = refusal(data(shards))
    assert re.search(r"web: \d+\.\d% of its documents begin with <\|document\|>, and by its index all do", told)
    assert (" 0.0%" in told) == (lost == "begin")


def test_sources_of_different_code_are_told_apart(shards: Path) -> None:
    """Preflight warns of them. Indexes of earlier releases do not say what made them."""
    web, code = open_sources(data(shards), 1000).values()
    assert made_differently([web, code]) == ""
    other = replace(code, index=replace(code.index, made_by={**code.index.made_by, "code": "0"}))
    assert "differ in the code that tokenised them" in made_differently([web, other])
    assert made_differently([web, replace(code, index=replace(code.index, made_by={}))]) == ""


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


@pytest.mark.parametrize(
    ("lost", "name"),
    [
        (Path.unlink, "web/shard-00001.tokens"),
        (truncate, "web/shard-00001.tokens"),
        (truncate, "code/shard-00000.documents"),
        (Path.unlink, f"web/{INDEX}"),
    ],
)
def test_what_is_missing_is_read_from_the_fallback(
    shards: Path, tmp_path: Path, lost: Callable[[Path], None], name: str
) -> None:
    """A file that the node has not, or not whole, comes from the copy on network storage, with the same tokens."""
    copy = tmp_path / "network"
    shutil.copytree(shards, copy)
    lost(shards / name)
    sources = open_sources(data(shards, fallback=str(copy)), 1000)
    for source in sources.values():
        assert source.fallback is not None
        corpora = [open_corpus(folder, source.fallback, LENGTH) for folder in (source.folder, source.fallback)]
        contents = []
        for corpus in corpora:
            tokens = np.empty((corpus.sequences, LENGTH + 1), np.int64)
            corpus.read(range(corpus.sequences), tokens, np.empty((corpus.sequences, LENGTH), np.int32))
            contents.append(tokens)
        assert np.array_equal(*contents)
    assert name.partition("/")[2] in refusal(data(shards))


def test_a_damaged_fallback_is_refused(shards: Path, tmp_path: Path) -> None:
    """A file that is nowhere whole is named with the folder that it was last looked for in."""
    copy = tmp_path / "network"
    shutil.copytree(shards, copy)
    (shards / "web/shard-00001.tokens").unlink()
    truncate(copy / "web/shard-00001.tokens")
    assert str(copy / "web/shard-00001.tokens") in refusal(data(shards, fallback=str(copy)))


def test_a_source_of_less_than_a_sequence_is_refused(shards: Path) -> None:
    """A source too small to give one sequence is named."""
    tokenizer = load_tokenizer(shards / "web" / TOKENIZER)
    make_corpus(["few words"], tokenizer, shards / "code", shard_tokens=300)
    assert f"{shards}/code has fewer tokens than one sequence of {LENGTH}" in refusal(data(shards))


def test_sources_of_two_tokenizers_are_refused(shards: Path) -> None:
    """Corpora whose ids mean different things cannot be mixed."""
    make_corpus(TEXTS["code"], train_tokenizer(TEXTS["code"], 280), shards / "code", shard_tokens=300)
    message = refusal(data(shards))
    assert "different tokenizers" in message
    assert "/code" in message
    assert "/web" in message


def test_sources_whose_documents_end_otherwise_are_refused(shards: Path) -> None:
    """One tokenizer, but two ideas of what separates documents: the model would learn neither."""
    raw = json.loads((shards / "code" / INDEX).read_text())
    raw["framing"] = {"separator": "</s>", "bos": ["<s>"]}
    (shards / "code" / INDEX).write_text(json.dumps(raw))
    message = refusal(data(shards))
    assert "/code begin and end with <s> and </s>, those of" in message or "begin and end with <|document|>" in message


def test_chats_of_different_templates_are_refused(shards: Path) -> None:
    """Sources without chats may be mixed with them; a run that names a template needs chats."""
    assert "none.jinja cannot be read" in refusal(data(shards, chat_template="none.jinja"))
    assert "has chats; leave out data.chat_template" in refusal(data(shards, chat_template=str(shards / "web" / INDEX)))
    for name, template in (("code", "xxh3_128:1"), ("web", "xxh3_128:2")):
        raw = json.loads((shards / name / INDEX).read_text())
        raw["framing"]["template"] = template
        (shards / name / INDEX).write_text(json.dumps(raw))
        if name == "code":
            open_sources(data(shards), 1000)
    assert "have been rendered with different chat templates" in refusal(data(shards))


def test_another_tokenizer_than_the_wanted_one_is_refused(shards: Path, tmp_path: Path) -> None:
    """data.tokenizer is compared with the one that made the shards; the file it was made from passes."""
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    shutil.copy(shards / "web" / TOKENIZER, same)
    train_tokenizer(["quite other words"] * 9, 270).save(str(other))
    open_sources(data(shards, tokenizer=str(same)), 1000)
    assert "another tokenizer than data.tokenizer" in refusal(data(shards, tokenizer=str(other)))
    assert "is not a tokenizer" in refusal(data(shards, tokenizer=str(shards / "web" / INDEX)))


def without_ids(shards: Path, folder: Path, last: int) -> Path:
    """A tokenizer whose ids begin with 1, and of which the greatest is ``last``."""
    content = json.loads((shards / "web" / TOKENIZER).read_text())
    vocab: dict[str, int] = content["model"]["vocab"]
    del vocab[DOCUMENT]
    vocab[max(vocab, key=lambda token: vocab[token])] = last
    content["model"]["merges"], content["added_tokens"] = [], []
    path = folder / "holes.json"
    path.write_text(json.dumps(content))
    return path


def test_an_id_of_two_tokens_is_refused(shards: Path, tmp_path: Path) -> None:
    """The token between documents got the id of another, which then began a document wherever it stood."""
    with pytest.raises(DataError, match=r"would get 289, which is that of .*; give every id"):
        add_separator(load_tokenizer(without_ids(shards, tmp_path, 289)), DOCUMENT)


def test_ids_are_counted_up_to_the_greatest(shards: Path, tmp_path: Path) -> None:
    """A model needs a row for each, and shards a type that holds each."""
    tokenizer = load_tokenizer(without_ids(shards, tmp_path, 70_000))
    add_separator(tokenizer, DOCUMENT)
    index = make_corpus(["some words"], tokenizer, tmp_path / "corpus", shard_tokens=300)
    assert (index.vocab, index.dtype) == (70_001, "uint32")


def test_more_ids_than_the_model_has_are_refused(shards: Path) -> None:
    """A vocabulary larger than the model's embedding is refused with both numbers."""
    vocab = read_index(shards / "web").vocab
    assert f"has {vocab} token ids, model.vocab is 100" in refusal(data(shards), vocab=100)
