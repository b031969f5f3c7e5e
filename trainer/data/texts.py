"""Documents from files of text, JSON, CSV, Parquet or Arrow, which may be compressed.

The format of a file is detected from its first bytes if possible. A name decides only between formats that look
alike: JSON, CSV and plain text. A file that cannot be read is refused by name, or left out and counted.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from opsd.trainer.data.shards import DataError, Tally

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
JSON = (".jsonl", ".ndjson", ".json")
TABLES = {".csv": ",", ".tsv": "\t"}
TEXT = (".txt", ".md", ".py")
SUFFIXES = (*TEXT, *JSON, *TABLES, ".parquet", ".arrow")
"""Files used from folders by default, compressed or not."""

FIELD = "text"
"""The field of JSON, CSV, Parquet and Arrow files with the text, by default."""

MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encodings by the byte order mark. That of UTF-32 begins with that of UTF-16, so it comes first."""

NULL, EMPTY, UNREADABLE = "documents without a text", "empty documents", "files that cannot be read to their end"
HALVES = "halves of characters (unpaired surrogates)"
"""Why something was dropped."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read: the field of a record that has the text, and the encoding of text without a mark."""

    field: str = FIELD
    encoding: str = "utf-8"
    skip_unreadable: bool = False
    """Leave out files that cannot be read, and count them, in place of refusing them."""
    has_options: bool = True
    """Whether the command has options for these; errors name them then."""

    def hint(self, words: str) -> str:
        """``words`` as the end of a sentence, if the command has the options in them."""
        return f"; {words}" if self.has_options else ""


def find_files(
    sources: Iterable[Path],
    suffixes: tuple[str, ...] = SUFFIXES,
    others: Counter[str] | None = None,
    reading: Reading | None = None,
) -> list[Path]:
    """The files among ``sources``, and those below its folders that end in one of ``suffixes``, sorted, each once.

    For a compressed file the suffix before the compression counts. JSON and CSV are also the form of settings and
    results, so that of folders only those whose first record has the field are taken. ``others`` counts by reason what
    else is in folders, but for hidden files. Raises DataError if there are no files, and for a link to nothing.
    """
    found: dict[tuple[int, int], Path] = {}
    others, reading = Counter() if others is None else others, reading or Reading(has_options=False)

    def take(path: Path) -> None:
        about = path.stat()
        found.setdefault((about.st_dev, about.st_ino), path)

    for source in sources:
        if source.is_dir():
            for path in _below(source):
                if not (why := _why_not(path, suffixes, reading)):
                    take(path)
                elif not any(part.startswith(".") for part in path.relative_to(source).parts):
                    others[why] += 1
        elif source.is_file():
            take(source)
        else:
            raise DataError(f"{source} {_no_file(source)}")
    if not found:
        why = "".join(f"; {count:,} {name} left out" for name, count in sorted(others.items()))
        raise DataError(f"no file with texts that ends in {' or '.join(suffixes)} was found{why}")
    return sorted(found.values())


def _below(folder: Path) -> Iterator[Path]:
    """All names below ``folder`` but those of folders. Linked folders are followed, each folder once."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    seen = set[tuple[int, int]]()
    for top, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        about = Path(top).stat()
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        yield from (Path(top, name) for name in names)


def _why_not(path: Path, suffixes: tuple[str, ...], reading: Reading) -> str:
    """Why ``path``, found in a folder, is left out, "" if it is taken. Raises DataError."""
    end = kind(path)
    if end not in suffixes:
        return f"files that end in {end or path.name}"
    if not path.is_file():
        if path.exists():
            return "pipes, sockets or devices"
        if not reading.skip_unreadable:
            leave_out = ", or pass --skip-unreadable to leave it out" if reading.has_options else ""
            raise DataError(f"{path} {_no_file(path)}; remove it{leave_out}")
        return "links to nothing"
    if end in (".json", *TABLES) and not _has_texts(path, reading):
        return f'files that end in {end} and do not begin with a record that has "{reading.field}"'
    return ""


def _no_file(path: Path) -> str:
    if path.exists():
        return "is neither a file nor a folder; write what it has to a file"
    return "is a link to nothing" if path.is_symlink() else "does not exist"


def kind(path: Path) -> str:
    """The suffix of ``path`` without that of a compression, in lower case."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


class _OtherContentError(DataError):
    """A file of another content than documents: it can be read, and has no field with the text."""


def _has_texts(path: Path, reading: Reading) -> bool:
    """Whether the first record of the file has the field. A file that cannot be read is refused when it is read."""
    try:
        next(_documents(path, reading), None)
    except _OtherContentError:
        return False
    except DataError:
        return True
    return path.stat().st_size > 0


def read_texts(
    files: Iterable[Path], limit: int = 1 << 62, reading: Reading | None = None, tally: Tally | None = None
) -> Iterator[str]:
    """The documents of ``files``, up to ``limit`` bytes in all, counted in ``tally``.

    Documents that are empty or null are dropped, and in JSON unpaired surrogates. A text file is one document. Raises
    DataError for a file that cannot be read.
    """
    reading, tally, left = reading or Reading(has_options=False), tally or Tally(), limit
    for path in files:
        tally.files += 1
        with suppress(OSError):  # told when it is opened
            tally.bytes += path.stat().st_size
        try:
            for read in _documents(path, reading):
                text = encodable(read, tally) if read else read
                left -= len(text.encode()) if text else 0
                if left < 0:
                    return
                if text:
                    tally.documents += 1
                    yield text
                else:
                    tally.drop(NULL if text is None else EMPTY)
        except DataError:
            if not reading.skip_unreadable:
                raise
            tally.drop(UNREADABLE)


def encodable(text: str, tally: Tally) -> str:
    """``text`` without unpaired surrogates, which are counted as dropped."""
    try:
        text.encode()
    except UnicodeEncodeError:
        kept = text.encode("utf-8", "ignore").decode()
        tally.drop(HALVES, len(text) - len(kept))
        return kept
    return text


def _documents(path: Path, reading: Reading) -> Iterator[str | None]:
    try:
        with _open(path) as file:
            yield from _reader(path, file.peek(8)[:8])(path, file, reading)
    except _damages() as error:
        raise DataError(f"{path} cannot be read: {error}") from error


Reader = Callable[[Path, "io.BufferedReader", Reading], Iterator["str | None"]]


def _reader(path: Path, begin: bytes) -> Reader:
    if begin.startswith(b"PAR1"):
        return _parquet
    if begin.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return _arrow
    if kind(path) in (".parquet", ".arrow") and begin:
        raise DataError(f"{path} is no {kind(path)[1:].capitalize()} file: its first bytes are {begin[:4]!r}")
    if kind(path) in JSON:
        return _json
    return _table if kind(path) in TABLES else _text


def _text(path: Path, file: io.BufferedReader, reading: Reading) -> Iterator[str | None]:
    text = _decode(path, file.read(), reading)
    if _is_record(text, reading.field):
        raise DataError(f'{path} has JSON lines with "{reading.field}"; name it {path.stem}.jsonl to have their texts')
    yield text


def _decode(path: Path, raw: bytes, reading: Reading) -> str:
    encoding = next((name for mark, name in MARKS.items() if raw.startswith(mark)), reading.encoding)
    what_to_do = reading.hint("pass --encoding, or --skip-unreadable to leave it out")
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not {encoding} (byte {error.start:,}){what_to_do}") from error
    if "\0" in text:
        raise DataError(f"{path} has NUL bytes, so it is no text or has another encoding{what_to_do}")
    return text


def _is_record(text: str, field: str) -> bool:
    """Whether ``text`` begins with a line that is a JSON object with a text in ``field``."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        record = json.loads(text.lstrip().partition("\n")[0])
    except ValueError:
        return False
    return isinstance(record.get(field), str)


def _json(path: Path, file: io.BufferedReader, reading: Reading) -> Iterator[str | None]:
    """The texts of a line each, of an array, or of one object over many lines. The last two are read whole."""
    encoding = next((name for mark, name in MARKS.items() if file.peek(4).startswith(mark)), reading.encoding)
    lines = io.TextIOWrapper(file, encoding, newline="\n")
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                if number > 1 and not _opens(line):
                    raise
                record = json.loads(line + lines.read())
            for entry in record if isinstance(record, list) else [record]:
                yield _field(entry, reading.field)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not {encoding}{reading.hint('pass --encoding')}") from error
    except _NoTextError:
        raise _OtherContentError(f'{path}, line {number}: "{reading.field}" is not text') from None
    except (KeyError, TypeError) as error:
        raise _OtherContentError(_no_record(path, number, reading)) from error
    except (ValueError, RecursionError) as error:
        raise DataError(_no_record(path, number, reading)) from error


def _no_record(path: Path, number: int, reading: Reading) -> str:
    return f'{path}, line {number}: not a JSON object with "{reading.field}"{reading.hint("see --field")}'


def _opens(line: str) -> bool:
    """Whether a value of several lines may begin here: an array or object of which nothing else is in its line."""
    return line.strip() in ("[", "{")


class _NoTextError(Exception):
    pass


def _field(entry: Any, field: str) -> str | None:
    text = entry[field]
    if text is not None and not isinstance(text, str):
        raise _NoTextError
    return text


def _table(path: Path, file: io.BufferedReader, reading: Reading) -> Iterator[str | None]:
    csv.field_size_limit(1 << 31)
    encoding = next((name for mark, name in MARKS.items() if file.peek(4).startswith(mark)), reading.encoding)
    rows = csv.DictReader(io.TextIOWrapper(file, encoding, newline=""), delimiter=TABLES[kind(path)], strict=True)
    try:
        if reading.field not in (names := rows.fieldnames or ()):
            raise _OtherContentError(_no_column(path, names, reading))
        if list(names).count(reading.field) > 1:
            raise DataError(f'{path} has several columns "{reading.field}"; give each a name of its own')
        for row in rows:
            if None in row:
                raise DataError(f"{path}, line {rows.line_num}: more columns than the {len(names)} of the first line")
            yield row[reading.field]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}, line {rows.line_num}: {error}") from error


def _parquet(path: Path, file: io.BufferedReader, reading: Reading) -> Iterator[str | None]:
    arrow, parquet = _pyarrow(path), _pyarrow(path, "parquet")
    try:
        table = parquet.ParquetFile(file)
        _check_column(arrow, path, table.schema_arrow, reading)
        for batch in table.iter_batches(batch_size=1024, columns=[reading.field]):
            yield from batch.column(0).cast(arrow.large_string()).to_pylist()
    except arrow.ArrowException as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _arrow(path: Path, file: io.BufferedReader, reading: Reading) -> Iterator[str | None]:
    arrow, ipc = _pyarrow(path), _pyarrow(path, "ipc")
    try:
        if file.peek(6).startswith(b"ARROW1"):
            table = ipc.open_file(file)
            batches: Iterable[Any] = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            batches = table = ipc.open_stream(file)
        _check_column(arrow, path, table.schema, reading)
        for batch in batches:
            yield from batch.column(reading.field).cast(arrow.large_string()).to_pylist()
    except arrow.ArrowException as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _no_column(path: Path, names: Iterable[str], reading: Reading) -> str:
    return f'{path} has no column "{reading.field}" but {", ".join(names)}{reading.hint("see --field")}'


def _check_column(arrow: Any, path: Path, schema: Any, reading: Reading) -> None:
    field = reading.field
    if field not in schema.names:
        raise DataError(_no_column(path, schema.names, reading))
    if schema.names.count(field) > 1:
        raise DataError(f'{path} has several columns "{field}"; give each a name of its own')
    type_ = schema.field(field).type
    type_ = type_.value_type if arrow.types.is_dictionary(type_) else type_
    if str(type_) not in ("string", "large_string", "string_view", "null"):
        raise DataError(f'{path}: the column "{field}" has {type_}, not text{reading.hint("see --field")}')


def _pyarrow(path: Path, module: str = "") -> Any:
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise DataError(f"{path} is a Parquet or Arrow file; install pyarrow to read it") from error
    return {"": pyarrow, "parquet": parquet, "ipc": ipc}[module]


def _open(path: Path) -> io.BufferedReader:
    """The content of ``path``, decompressed if its first bytes are those of a compression."""
    with path.open("rb") as file:
        begin = file.read(6)
    opened = next((open_ for magic, open_ in COMPRESSIONS.items() if begin.startswith(magic)), None)
    if opened is not None:
        return io.BufferedReader(cast("io.RawIOBase", opened(path)), 1 << 20)
    if path.suffix.lower() in COMPRESSED and begin:
        raise DataError(f"{path} is not compressed as its name says: its first bytes are {begin[:4]!r}")
    return path.open("rb")


class ZstdFrames(io.RawIOBase):
    """The content of a zstd file with any number of frames. The library's own reader accepts truncated files.

    Reading raises EOFError for those.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._new_frame = _zstandard(path).ZstdDecompressor().decompressobj
        self._file = file
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See ``io.RawIOBase``."""
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
        """Close the file, too."""
        self._file.close()
        super().close()


def _open_zstd(path: Path) -> ZstdFrames:
    return ZstdFrames(path.open("rb"), path)


COMPRESSIONS: Mapping[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}
"""How a file is decompressed, by its first bytes."""


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{path} is compressed with zstd; install zstandard to read it") from error
    return zstandard


def _damages() -> tuple[type[Exception], ...]:
    """The exceptions of reading a damaged file."""
    known: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    try:
        import zstandard
    except ImportError:
        return known
    return (*known, zstandard.ZstdError)
