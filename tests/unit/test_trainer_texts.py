"""Reading documents from files, and tokenising many of them in parallel and in several goes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opsd.trainer.data.build import PLAN, BuildTask, build, group
from opsd.trainer.data.shards import INDEX, DataError, read_index, verify
from opsd.trainer.data.texts import find_files, read_texts
from opsd.trainer.data.tokenize import make_corpus, train_tokenizer
from tests.fakes.clock import until

TEXTS = [f"document {i} has größer words\n" * (i % 4 + 1) for i in range(50)]
JSONL = "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(TEXTS)).encode()


def write_parquet(path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": TEXTS}), path)


def write_zstd(path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    half = JSONL.index(b"\n", len(JSONL) // 2) + 1
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(JSONL[:half]) + compress(JSONL[half:]))  # two frames, as parallel compressors write them


FORMATS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(JSONL),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(JSONL)),
    "a.jsonl.zst": write_zstd,
    "a.parquet": write_parquet,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    """JSON lines and Parquet, plain and compressed, are found in a folder and read whole."""
    FORMATS[name](tmp_path / name)
    assert list(read_texts(find_files([tmp_path]))) == TEXTS


def test_half_an_emoji_does_not_end_a_build(tmp_path: Path) -> None:
    """Scraped JSON has texts that were cut within a surrogate pair; they are tokenised like any other."""
    (tmp_path / "a.jsonl").write_text('{"text": "cut \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    texts = list(read_texts([tmp_path / "a.jsonl"]))
    assert texts == ["cut ?", "whole \N{GRINNING FACE}"]
    assert len(train_tokenizer(texts, 300).encode_batch_fast(texts)) == 2


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str) -> None:
    """Half a download is named, not silently used as far as it goes."""
    FORMATS[name](tmp_path / name)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    with pytest.raises(DataError, match=name):
        list(read_texts([tmp_path / name]))


@pytest.mark.parametrize(
    ("line", "expected"),
    [(b'{"content": "x"}', "line 2: not a JSON object with"), (b"{", "line 2"), (b'{"text": 3}', "is not text")],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, expected: str) -> None:
    """A line that is no JSON or lacks the field is refused with its number."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=expected):
        list(read_texts([tmp_path / "a.jsonl"]))


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A Parquet file without the column says which it has."""
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match='no column "body" but text'):
        list(read_texts([tmp_path / "a.parquet"], field="body"))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Several files, each a group of its own because they are large or are made one by one."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.jsonl").write_bytes(b"".join(JSONL.splitlines(keepends=True)[number * 10 :][:10]))
    return find_files([folder])


def shards_of(folder: Path) -> list[bytes]:
    return [(folder / shard.token_file.name).read_bytes() for shard in read_index(folder).shards]


def test_files_are_grouped_by_size(files: list[Path]) -> None:
    """Small files are put together, in their order."""
    assert group(files, 1 << 30) == [files]
    assert group(files, 1) == [[file] for file in files]


def test_a_build_gives_what_one_process_gives(tmp_path: Path, files: list[Path]) -> None:
    """The tokens of a build are those of the documents in the order of the files, and its records are gone."""
    tokenizer = train_tokenizer(TEXTS, 300)
    build(files, tokenizer, BuildTask(tmp_path / "out", "text", 10**6, 1), workers=1)
    make_corpus(TEXTS, tokenizer, tmp_path / "plain", 10**6)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "plain")
    verify(tmp_path / "out", read_index(tmp_path / "out"), content=True)
    assert not (tmp_path / "out" / PLAN).exists()


def test_a_build_goes_on_where_it_was(tmp_path: Path, files: list[Path]) -> None:
    """Interrupted, a build does only what is left; with other settings it is refused."""
    tokenizer = train_tokenizer(TEXTS, 300)
    job = BuildTask(tmp_path / "out", "text", 10**6, 1)
    big = tmp_path / "in" / "9.jsonl"
    big.write_bytes(b"not json\n")
    with pytest.raises(DataError, match=r"9\.jsonl"):
        build([*files, big], tokenizer, job, workers=1)
    assert not (job.folder / INDEX).exists()
    with pytest.raises(DataError, match="was begun with other files"):
        build(files, tokenizer, job, workers=1)


PROGRAM = """
import sys
from pathlib import Path
from tokenizers import Tokenizer
from opsd.trainer.data.build import BuildTask, build
source, out, tokenizer = map(Path, sys.argv[1:])
build(sorted(source.iterdir()), Tokenizer.from_file(str(tokenizer)), BuildTask(out, "text", 10**6, 1, 1), workers=2)
"""


@pytest.mark.slow
def test_a_build_survives_a_kill(tmp_path: Path) -> None:
    """Killed in the middle of a parallel build and run again, it does the rest and gives what one process gives."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for number in range(6):
        (source / f"{number}.jsonl").write_bytes(JSONL * 300)
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", PROGRAM, source, out, tmp_path / "tokenizer.json"]
    process = subprocess.Popen(command, start_new_session=True)
    until(lambda: list(out.glob("part-*.json")), 120)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / INDEX).exists()
    parts = [f"shard-{path.stem[5:]}-00000.tokens" for path in out.glob("part-*.json")]
    written = {name: (out / name).stat().st_mtime_ns for name in parts}
    subprocess.run(command, check=True, timeout=120)
    assert written == {name: (out / name).stat().st_mtime_ns for name in parts}
    make_corpus(TEXTS * 300, tokenizer, tmp_path / "plain", 10**9)
    assert b"".join(shards_of(out)) == shards_of(tmp_path / "plain")[0] * 6
