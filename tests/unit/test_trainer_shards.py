"""From text to token shards and back, and shards that do not match their index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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
    read_index,
    sequence_counts,
    verify,
)
from opsd.trainer.data.texts import find_files, read_texts
from opsd.trainer.data.tokenize import load_tokenizer, make_corpus, train_tokenizer

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
