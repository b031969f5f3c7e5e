"""Documents from files: text, JSON lines and Parquet, plain or compressed with gzip or zstd."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from opsd.trainer.data.shards import DataError

COMPRESSED = (".gz", ".zst")
LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
SUFFIXES = (".txt", ".md", ".py", *LINES, PARQUET)
"""Files used from folders by default, compressed or not."""

FIELD = "text"
"""The field of JSON lines and Parquet files with the text, by default."""


def find_files(sources: Iterable[Path], suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files among ``sources``, and those below its folders that end in one of ``suffixes``, sorted.

    For a compressed file the suffix before the compression counts. Raises DataError if there are none.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += (path for path in source.rglob("*") if kind(path) in suffixes and path.is_file())
        elif source.is_file():
            found.append(source)
        else:
            raise DataError(f"{source} does not exist")
    if not found:
        raise DataError(f"no file that ends in {' or '.join(suffixes)} was found")
    return sorted(set(found))


def kind(path: Path) -> str:
    """The suffix of ``path`` without that of a compression."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def read_texts(files: Iterable[Path], limit: int = 1 << 62, field: str = FIELD) -> Iterator[str]:
    """The documents of ``files``, up to ``limit`` bytes in all; empty ones are skipped.

    A text file is one document, and skipped if it is not UTF-8. An unpaired surrogate in JSON lines becomes "?". Raises
    DataError for other files that cannot be read.
    """
    left = limit
    for path in files:
        for text in _documents(path, field):
            left -= len(text.encode())
            if left < 0:
                return
            if text:
                yield text


def _documents(path: Path, field: str) -> Iterator[str]:
    try:
        if kind(path) == PARQUET:
            yield from _parquet(path, field)
        elif kind(path) in LINES:
            yield from _lines(path, field)
        else:
            with _open(path) as file:
                raw = file.read()
            try:
                yield raw.decode("utf-8")
            except UnicodeDecodeError:
                return
    except _damage(path) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _lines(path: Path, field: str) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f'{path}, line {number}: not a JSON object with "{field}"; see --field') from error
            if not isinstance(text, str):
                raise DataError(f'{path}, line {number}: "{field}" is not text')
            yield text.encode("utf-8", "replace").decode()


def _parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path} is a Parquet file; install pyarrow to read it") from error
    try:
        table = parquet.ParquetFile(path)
        if field not in table.schema_arrow.names:
            raise DataError(f'{path} has no column "{field}" but {", ".join(table.schema_arrow.names)}; see --field')
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            yield from (text for text in batch.column(0).cast(arrow.string()).to_pylist() if text)
    except arrow.ArrowException as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstd(path, _zstandard(path)), 1 << 20)
    return path.open("rb")


class _Zstd(io.RawIOBase):
    """The content of a zstd file with any number of frames. The library's own reader accepts truncated files."""

    def __init__(self, path: Path, zstandard: Any) -> None:
        self._file = path.open("rb")
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._file.read(1 << 17)
            if not block and self._frame is not None:
                raise EOFError("it ends in the middle of a frame")
            if not block:
                return 0
            self._ready = memoryview(b"".join(self._decompress(block)))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, block: bytes) -> Iterator[bytes]:
        while block:
            self._frame = self._frame or self._new_frame()
            yield self._frame.decompress(block)
            block = self._frame.unused_data
            if self._frame.eof:
                self._frame = None

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{path} is compressed with zstd; install zstandard to read it") from error
    return zstandard


def _damage(path: Path) -> tuple[type[Exception], ...]:
    """The exceptions of reading a damaged ``path``."""
    return (OSError, EOFError, zlib.error, *((_zstandard(path).ZstdError,) if path.suffix == ".zst" else ()))
