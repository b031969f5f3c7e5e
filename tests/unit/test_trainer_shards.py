"""From text to token shards and back, and the corpora of a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from opsd.trainer.data.shards import (
    DOCUMENT,
    INDEX,
    TOKENIZER,
    Corpus,
    DataError,
    File,
    Index,
    Shard,
    describe,
    open_corpus,
    read_index,
    sequence_counts,
    verify,
    write_index,
)
from opsd.trainer.data.sources import made_differently, open_sources, sizes
from opsd.trainer.data.texts import find_files, read_texts
from opsd.trainer.data.tokenize import add_separator, load_tokenizer, make_corpus, train_tokenizer
from opsd.trainer.data_settings import DataSettings, StageSettings

# From text to token shards and back, and shards that do not match their index.


TEXTS = [f"def f{i}(x):\n    return x + {i}  # größer {DOCUMENT}\n" * (i % 5 + 1) for i in range(60)]

VOCAB = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(TEXTS, train_tokenizer(TEXTS, VOCAB), folder, shard_tokens=2000)
    return folder


def read_all(folder: Path, length: int) -> tuple[np.ndarray, np.ndarray]:
    index = read_index(folder)
    count = sum(sequence_counts(index, length))
    tokens, documents = np.empty((count, length + 1), np.int64), np.empty((count, length), np.int32)
    Corpus(folder, index, length).read(range(count), tokens, documents)
    return tokens, documents


def test_text_comes_back(corpus: Path) -> None:
    """The tokens of the shards decode to the documents that went in, markers in the text included."""
    tokenizer = Tokenizer.from_file(str(corpus / TOKENIZER))
    begin = tokenizer.token_to_id(DOCUMENT)
    decoded: list[str] = []
    for shard in read_index(corpus).shards:
        tokens = np.fromfile(corpus / shard.token_file.name, dtype="uint16")
        starts = np.fromfile(corpus / shard.document_file.name, dtype="uint64").astype(int)
        assert (tokens[starts] == begin).all()
        assert np.count_nonzero(tokens == begin) == len(starts) == shard.documents
        decoded += [tokenizer.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]
    assert decoded == TEXTS


def test_shards_are_cut_between_documents(corpus: Path) -> None:
    """There are several shards, and what the index counts is what they hold."""
    index = read_index(corpus)
    assert len(index.shards) > 1
    assert sum(shard.documents for shard in index.shards) == len(TEXTS)
    assert index.vocab == VOCAB
    verify(corpus, index, content=True)


def test_sequences_tile_the_shards(corpus: Path) -> None:
    """Sequences cover a shard without gaps; each ends with the token that the next one begins with."""
    length = 64
    tokens, _ = read_all(corpus, length)
    first = read_index(corpus).shards[0]
    stored = np.fromfile(corpus / first.token_file.name, dtype="uint16")
    count = (first.tokens - 1) // length
    assert np.array_equal(tokens[:count, :-1].ravel(), stored[: count * length])
    assert np.array_equal(tokens[: count - 1, -1], tokens[1:count, 0])


def test_documents_are_numbered_where_they_begin(corpus: Path) -> None:
    """Within a sequence the document number goes up exactly at the tokens that begin a document."""
    tokens, documents = read_all(corpus, 64)
    begin = Tokenizer.from_file(str(corpus / TOKENIZER)).token_to_id(DOCUMENT)
    begins = tokens[:, :-1] == begin
    assert np.array_equal(np.diff(documents, axis=1), begins[:, 1:].astype(np.int32))
    assert documents.max() > 0


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30), length=st.integers(1, 12), cut=st.integers(1, 5))
def test_any_documents_are_numbered_rightly(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, cut: int
) -> None:
    """For any lengths of documents and sequences, two tokens have one number exactly if they are of one document."""
    folder = tmp_path_factory.mktemp("any")
    shards, expected = [], []
    for number, part in enumerate([lengths[:cut], lengths[cut:]]):
        owners = np.repeat(np.arange(len(part)), part)
        starts = np.cumsum([0, *part], dtype=np.uint64)[:-1]
        owners.astype(np.uint32).tofile(folder / f"{number}.tokens")
        starts.tofile(folder / f"{number}.documents")
        if part:
            files = [File(f"{number}.{kind}", 0, "") for kind in ("tokens", "documents")]
            shards.append(Shard(len(owners), len(part), *files))
        expected += [owners[at : at + length] for at in range(0, len(owners) - length, length)]
    index = Index(100, "uint32", File("t", 0, ""), tuple(shards))
    assert sum(sequence_counts(index, length)) == len(expected)
    tokens, documents = np.empty((len(expected), length + 1), np.int64), np.empty((len(expected), length), np.int32)
    Corpus(folder, index, length).read(range(len(expected)), tokens, documents)
    for row, owners in enumerate(expected):
        assert np.array_equal(documents[row], owners - owners[0])


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [(truncate, "bytes, the index says"), (flip, "does not match its checksum"), (Path.unlink, "No such file")],
)
@pytest.mark.parametrize("name", ["shard-00001.tokens", "shard-00000.documents", TOKENIZER])
def test_damaged_files_are_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], expected: str, name: str
) -> None:
    """A file that is shorter, different or gone is refused in one sentence that names it."""
    make_corpus(TEXTS, train_tokenizer(TEXTS, VOCAB), tmp_path, shard_tokens=2000)
    damage(tmp_path / name)
    with pytest.raises(DataError, match=expected) as error:
        verify(tmp_path, read_index(tmp_path), content=True)
    assert name in str(error.value)


def test_the_check_is_shared(tmp_path: Path) -> None:
    """Of several checkers exactly one finds a flipped bit, and all find a truncated file."""
    make_corpus(TEXTS, train_tokenizer(TEXTS, VOCAB), tmp_path, shard_tokens=2000)
    index = read_index(tmp_path)

    def finders() -> int:
        found = 0
        for part in range(3):
            try:
                verify(tmp_path, index, content=True, part=part, parts=3)
            except DataError:
                found += 1
        return found

    flip(tmp_path / "shard-00001.tokens")
    assert finders() == 1
    verify(tmp_path, index, content=False)
    truncate(tmp_path / "shard-00001.tokens")
    assert finders() == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda raw: raw.update(format=9), "has format 9"),
        (lambda raw: raw.pop("vocab"), "is not an index"),
        (lambda raw: raw.update(dtype="float32"), "type float32"),
        (lambda raw: raw["shards"][0]["token_file"].update(name="../../etc/passwd"), "outside its folder"),
    ],
)
def test_strange_indexes_are_refused(
    corpus: Path, tmp_path: Path, change: Callable[[dict], object], expected: str
) -> None:
    """An index of another format, with holes, or that points elsewhere is refused."""
    raw = json.loads((corpus / INDEX).read_text())
    change(raw)
    (tmp_path / INDEX).write_text(json.dumps(raw))
    with pytest.raises(DataError, match=expected):
        read_index(tmp_path)


def test_a_missing_corpus_says_how_to_make_it(tmp_path: Path) -> None:
    """Without an index the error names the command that makes one."""
    with pytest.raises(DataError, match=r"python -m opsd.trainer\.data"):
        read_index(tmp_path)


def test_existing_tokenizer_gives_the_same_shards(corpus: Path, tmp_path: Path) -> None:
    """A corpus made with the tokenizer of another has the same tokens."""
    index = make_corpus(TEXTS, load_tokenizer(corpus / TOKENIZER), tmp_path, shard_tokens=2000)
    assert index.digest == read_index(corpus).digest


def test_texts_are_filtered_and_bounded(tmp_path: Path) -> None:
    """Only files with the wanted endings are read, in order, up to the limit in bytes."""
    for name, content in {
        "b.py": b"bb",
        "a.py": b"aaa",
        "c.bin": b"c",
        "e.py": b"",
        "f.py": b"f" * 9,
    }.items():
        (tmp_path / name).write_bytes(content)
    files = find_files([tmp_path], (".py",))
    assert list(read_texts(files, 10)) == ["aaa", "bb"]
    assert list(read_texts(files, 100)) == ["aaa", "bb", "f" * 9]
    with pytest.raises(DataError, match=r"ends in \.rs"):
        find_files([tmp_path], (".rs",))
    with pytest.raises(DataError, match="does not exist"):
        find_files([tmp_path / "none"], (".py",))


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opsd.trainer.data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command(tmp_path: Path) -> None:
    """The command makes a corpus, says what is in it, and does not replace one unasked."""
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number}.py").write_text(text)
    out = tmp_path / "out"
    made = run(tmp_path / "text", "--out", out, "--vocab", VOCAB)
    assert made.returncode == 0, made.stderr
    assert "60 documents" in made.stdout
    verify(out, read_index(out), content=True)
    again = run(tmp_path / "text", "--out", out)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "--overwrite" in again.stderr
    assert run(tmp_path / "text", "--out", out, "--overwrite", "--tokenizer", out / TOKENIZER).returncode == 0
    assert run(tmp_path / "none", "--out", tmp_path / "o2").returncode == 2
    assert run(tmp_path / "text", "--out", tmp_path / "text" / "0.py").returncode == 2


def test_a_corpus_is_replaced_once_its_sources_are_known_to_be_good(tmp_path: Path) -> None:
    """With sources or a tokenizer that cannot be used it stays; replaced by a smaller one, no shard is left over."""
    for name, texts in (("many", TEXTS), ("few", TEXTS[:2])):
        (tmp_path / name).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / name / f"{number}.py").write_text(text)
    out = tmp_path / "out"
    assert run(tmp_path / "many", "--out", out, "--vocab", VOCAB, "--shard-tokens", 500).returncode == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (tmp_path / "bad.json").write_text("{}")
    for arguments in ((tmp_path / "none",), (tmp_path / "few", "--tokenizer", tmp_path / "bad.json")):
        assert run(*arguments, "--out", out, "--overwrite").returncode == 2
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    replaced = run(tmp_path / "few", "--out", out, "--overwrite", "--tokenizer", out / TOKENIZER)
    assert replaced.returncode == 0, replaced.stderr
    index = read_index(out)
    verify(out, index, content=True)
    listed = {file.name for shard in index.shards for file in shard.files}
    assert len(before) > len(listed) + 2
    assert {path.name for path in out.iterdir()} == listed | {INDEX, TOKENIZER}


# Finding and checking the corpora of a run: several sources, a copy on slower storage, one tokenizer.


SOURCES = {name: [f"{name} number {i} of many words\n" * (i % 3 + 1) for i in range(40)] for name in ("web", "code")}

LENGTH = 16


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two corpora, web and code, made with the same tokenizer."""
    folder = tmp_path / "shards"
    tokenizer = train_tokenizer([text for texts in SOURCES.values() for text in texts], 290)
    for name, texts in SOURCES.items():
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
    make_corpus(
        SOURCES["code"],
        train_tokenizer(SOURCES["code"], 280),
        shards / "code",
        shard_tokens=300,
    )
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
