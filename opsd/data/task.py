"""One task of a stage, in the process that runs it: counted, written aside, proved, then put into place.

datatrove's local executor runs the steps, with a counter between every two of them. Nothing reads its marks of
completion. All output folders lead elsewhere while it runs. Once every file is on the disk, the attempt creates the
record of the task. The files of the first attempt that does so are moved into place. So an attempt that is killed, or
thought to be lost, changes nothing.
"""

from __future__ import annotations

import copy
import errno
import gzip
import io
import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from datatrove.executor import LocalPipelineExecutor
from datatrove.utils.logging import logger

from opsd import durable
from opsd.checkpoints.manifest import checksum
from opsd.data.identity import ADDRESS, digest_of, place_of
from opsd.data.pipeline import PipelineError, Stage, folders_of, name_of
from opsd.data.records import (
    BEAT_S,
    FAILED,
    LOG,
    SUCCESSFUL,
    Attempt,
    Done,
    Flow,
    StageFolder,
    Written,
    aside,
    publish,
)
from opsd.exitcodes import is_full
from opsd.words import first_line, with_remedy

_COMPRESSED: Final = (".gz", ".zst", ".xz", ".bz2")
_NO_TEXT: Final = "without text"
_LASTING: Final = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of the operating system that no other node and no later time changes, as a rule."""
_DAMAGE: Final = ("Error when reading", "may be corrupted")
"""What datatrove's readers say, at the level of a warning, of a document that they leave out because it is damaged."""
_BLANK: Final = "input data is empty"
"""What orjson says of a line without anything in it, which loses nothing."""


class Meter:
    """Counts what passes from a step, ``flow``, to the next one.

    Most documents leave the next step before another one goes in, so the last one that went in is kept as it is.
    Those before it are kept by id: they are still in the step, or were dropped there. An id that comes again is that of
    a dropped one.
    """

    __slots__ = ("_before", "_earlier", "_last", "_size", "_text", "ended", "flow")

    def __init__(self, flow: Flow, before: Meter | None = None) -> None:
        self.flow, self._before = flow, before
        self.ended = False
        self._last: Any = None
        self._text, self._size = "", 0
        self._earlier: dict[int, int] = {}

    def __call__(self, documents: Any, rank: int = 0, world_size: int = 1) -> Any:
        """Stand between two steps, as a step of datatrove."""
        if documents is None:
            self.flow.consumed = self._before is not None
            self.ended = True
            return None
        return self._counted(documents)

    def _counted(self, documents: Any) -> Iterator[Any]:
        flow, before = self.flow, self._before or Meter(self.flow)
        documents_out = bytes_out = 0
        for document in documents:
            text = document.text
            if document is before._last:
                before._last, size = None, before._size
                if text is not before._text:
                    size = size_of(text)
                    flow.edited += size - before._size
            else:
                size = size_of(text)
                if (came := before._earlier.pop(id(document), None)) is None:
                    flow.documents_made += 1
                    flow.bytes_made += size
                else:
                    flow.edited += size - came
            documents_out += 1
            bytes_out += size
            if self._last is not None:
                self._earlier[id(self._last)] = self._size
            self._last, self._text, self._size = document, text, size
            yield document
        flow.documents_out, flow.bytes_out = documents_out, bytes_out
        self.ended = True

    def settle(self) -> None:
        """Note what came into the step, once all documents have passed."""
        if self._before is not None:
            self.flow.documents_in, self.flow.bytes_in = self._before.flow.documents_out, self._before.flow.bytes_out


def size_of(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class LocalFiles:
    """The files that datatrove opens on file systems of this machine.

    fsspec leaves a file behind a compressor to the garbage collector. On a full disk the buffered end of the file is
    then lost without an error. So files for writing are kept and closed here.
    """

    def __init__(self) -> None:
        from fsspec.implementations.local import LocalFileSystem

        before = LocalFileSystem._open
        self.inputs: tuple[str, ...] = ()
        """Folders below which nothing may be written."""
        self.read: dict[str, None] = {}
        """The paths of those for reading, in the order in which they were opened."""
        self._written: list[Any] = []

        def opened(fs: Any, path: str, mode: str = "rb", **options: Any) -> Any:
            if mode != "rb" and path.startswith(self.inputs):
                raise PipelineError(
                    f"a step writes {path} into a folder that its stage reads: run that step without opsd"
                )
            file = before(fs, path, mode=mode, **options)
            if mode == "rb" and path.endswith(_COMPRESSED) and not os.fstat(file.fileno()).st_size:
                raise EOFError(f"{path} is empty: a compressed file has a head at least")
            if mode.startswith("r"):
                self.read[path] = None
            else:
                self._written = [*(each for each in self._written if not each.closed), file]
            return file

        LocalFileSystem._open = opened

    def forget(self) -> None:
        """Begin with none."""
        self.read, self._written = {}, []

    def close(self) -> None:
        """Raises OSError."""
        for file in self._written:
            file.close()

    def read_below(self, folder: str) -> list[str]:
        """The names of those for reading below ``folder``."""
        return sorted(path[len(folder) + 1 :] for path in self.read if path.startswith(f"{folder}/"))


class Textless:
    """Counts the documents that a reader of datatrove leaves out, since they have no text."""

    def __init__(self, reader: Any) -> None:
        self._reader, self._make = reader, reader.get_document_from_dict
        self._has_key = reader.adapter.__name__ == "_default_adapter"
        self._kept: set[str] = set()
        self.last: tuple[str, Any] = ("", 0)
        """The file and the number of the record that came last."""
        self._left_out: dict[str, int] = {}
        self._without_key: dict[str, list[str]] = {}
        reader.get_document_from_dict = self._made

    def _made(self, data: dict[str, Any], source: str, number: Any) -> Any:
        names, self.last = list(data), (source, number)
        document = self._make(data, source, number)
        if document is not None:
            self._kept.add(source)
        else:
            self._left_out[source] = self._left_out.get(source, 0) + 1
            if self._has_key and self._reader.text_key not in names:
                self._without_key.setdefault(source, names)
        return document

    def settle(self, flow: Flow) -> None:
        """Count them as dropped. Raises PipelineError if no document of a file has a text."""
        for source in self._without_key.keys() - self._kept:
            raise PipelineError(
                f"no document of {source} has a text: {flow.step} looks for {self._reader.text_key!r}, and there are "
                f"{', '.join(self._without_key[source][:10])}"
            )
        if count := sum(self._left_out.values()):
            flow.documents_made += count
            flow.reasons[_NO_TEXT] = count


class Tasks:
    """Runs tasks of one stage in this process, one after the other."""

    def __init__(self, stage: Stage, folder: StageFolder) -> None:
        """Raises PipelineError if the pipeline is not the one that the stage was planned with."""
        self._stage, self._folder = stage, folder
        plan = folder.plan
        if plan is None or [list(step) for step in stage.steps] != plan["steps"] or plan["tasks"] != stage.tasks:
            raise PipelineError(f"stage {stage.number} was changed while it runs: run `opsd data run` again")
        self._plan = digest_of(plan)
        self._said: list[str] = []
        self._readers: list[Textless] = []
        self._files = LocalFiles()
        self._files.inputs = tuple(f"{place}/" for place in stage.inputs if "://" not in place)
        same_bytes_at_any_time()

    def run(self, attempt: Attempt) -> Attempt:
        """Make an attempt. It gets an outcome whatever the steps do. Raises OSError if none can be kept."""
        rank = attempt.rank
        self._folder.note(attempt)
        staged = {place: str(aside(place, rank, attempt.token)) for place in self._stage.outputs}
        try:
            with _beating(self._folder, attempt):
                done = self._attempted(attempt, staged)
                if digest_of(self._folder.plan or {}) != self._plan:
                    raise PipelineError("the stage was begun again while this attempt ran")
                content = json.dumps(asdict(done)).encode()
                is_first = durable.create(self._folder.record(rank), content)
                attempt.outcome = SUCCESSFUL[not is_first]
                if is_first:
                    publish(done)
        except BaseException as error:
            attempt.outcome, attempt.why, attempt.error = FAILED, self._why(error), lasting(error)
            attempt.errno = getattr(error, "errno", None) or 0
            if _is_committed(self._folder, rank, attempt):  # the driver completes what is left to do
                return attempt
        finally:
            attempt.seen = time.time()
        for place in staged.values():
            shutil.rmtree(place, ignore_errors=True)
        self._folder.note(attempt)
        return attempt

    def _attempted(self, attempt: Attempt, staged: Mapping[str, str]) -> Done:
        pipeline = copy.deepcopy(self._stage.executor.pipeline)
        for step in pipeline:
            for name, folder in folders_of(step):
                if name.startswith("output"):
                    folder.path = staged[str(place_of(folder))]
        meters = _meters(pipeline)
        textless = {id(step): Textless(step) for step in pipeline if hasattr(step, "get_document_from_dict")}
        self._readers = list(textless.values())
        metered = [part for step, meter in zip(pipeline, meters, strict=True) for part in (step, meter)]
        self._said.clear()
        self._files.forget()
        executor = LocalPipelineExecutor(
            [self._listen, *metered],
            self._stage.tasks,
            logging_dir=str(self._folder.folder / LOG),
            skip_completed=False,
        )
        executor._run_for_rank(attempt.rank, local_rank=attempt.rank)
        self._files.close()
        if self._said:
            raise PipelineError(self._said[0])
        for step, meter in zip(pipeline, meters, strict=True):
            meter.settle()
            if (left_out := textless.get(id(step))) is not None:
                left_out.settle(meter.flow)
            _audit(step, meter)
        return Done(
            attempt.rank, self._plan, attempt.token, tuple(_written(staged)),
            {place: self._files.read_below(place) for place in self._stage.inputs if "://" not in place},
            tuple(meter.flow for meter in meters),
        )  # fmt: skip

    def _listen(self, documents: Any, rank: int = 0, world_size: int = 1) -> Any:
        """The first step: datatrove has just replaced all that listened to its log."""
        logger.add(self._hear, level="WARNING", format="{message}")
        return documents

    def _hear(self, message: Any) -> None:
        name, said = str(message.record["name"]), message.record["message"]
        is_damage = name.startswith("datatrove.pipeline.readers") and any(words in said for words in _DAMAGE)
        if is_damage and _BLANK not in said:
            after = [number + 1 for source, number in (each.last for each in self._readers) if f"`{source}`" in said]
            where = f"after line {after[0]:,}" if after else "before its first document"
            is_line = said.startswith(
                _DAMAGE[0]
            )  # text is decoded in blocks, so the place of another damage is not known
            self._said.append(first_line(said) + (f" (the file is damaged {where})" if is_line else ""))

    def _why(self, error: BaseException) -> str:
        if isinstance(error, PipelineError):
            return str(error)
        if isinstance(error, OSError) and (is_full(error.errno) or error.errno in (errno.EIO, errno.EROFS)):
            error.filename = error.filename or " or ".join(self._stage.outputs)
            return f"{with_remedy(error)} (`opsd incidents` on this node has the storage's)"
        if isinstance(error, MemoryError):
            return f"no memory is left; it had {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10:,} MiB"
        where = next(reversed(self._files.read), "")
        said = _said(error)
        return f"{said} (the file that was opened last is {where})" if where else said


def lasting(error: BaseException) -> str:
    """The exception, if it may well come again. "" for what passes: a full disk, the network, memory, an I/O error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError | ConnectionError | TimeoutError):
            return ""
        if isinstance(cause, OSError) and cause.errno and not isinstance(cause, _LASTING):
            return ""
        cause = cause.__cause__ or cause.__context__
    return ADDRESS.sub("", _said(error))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"


def _meters(pipeline: list[Any]) -> list[Meter]:
    meters: list[Meter] = []
    for step in pipeline:
        meters.append(Meter(Flow(name_of(step)), meters[-1] if meters else None))
    return meters


def _audit(step: Any, meter: Meter) -> None:
    """Compare the counts with what the step itself says. Raises PipelineError."""
    flow = meter.flow
    if not meter.ended:
        raise PipelineError(f"the step after {flow.step} stopped before the end of its documents: some were not read")
    counts = {name: int(metric.total) for name, metric in getattr(getattr(step, "stats", None), "stats", {}).items()}
    flow.reasons |= {name[8:]: count for name, count in counts.items() if name.startswith("dropped_")}
    if left := flow.documents_dropped - sum(flow.reasons.values()):
        flow.reasons[flow.step] = left
    checks = {}
    if hasattr(step, "filter_batch"):
        checks = {"dropped": flow.documents_dropped, "forwarded": flow.documents_out}
    elif hasattr(step, "read_file"):
        checks = {"documents": flow.documents_made - flow.reasons.get(_NO_TEXT, 0)}
    elif hasattr(step, "output_mg"):
        checks = {"total": flow.documents_in}
    for name, count in checks.items():
        if name in counts and counts[name] != count:
            raise PipelineError(
                f"{flow.step} has counted {counts[name]:,} documents as {name}, and there were {count:,}"
            )


def _written(staged: Mapping[str, str]) -> Iterator[Written]:
    """The files of an attempt, once they are on the disk. Raises OSError."""
    for place, folder in staged.items():
        for top, _, names in os.walk(folder):
            for name in sorted(names):
                path = Path(top, name)
                with open(path, "rb+") as file:
                    durable.sync(file)
                about = path.stat()
                yield Written(place, str(path.relative_to(folder)), about.st_size, checksum(path), about.st_mtime_ns)


def _is_committed(folder: StageFolder, rank: int, attempt: Attempt) -> bool:
    with suppress(PipelineError):
        return folder.record(rank).exists() and folder.read(rank).attempt == attempt.token
    return False


@contextmanager
def _beating(folder: StageFolder, attempt: Attempt) -> Iterator[None]:
    """Note every few seconds that the attempt lives."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            attempt.seen = time.time()
            with suppress(OSError):
                folder.note(attempt)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def same_bytes_at_any_time() -> None:
    """Have fsspec write gzip without the time of writing, so that an attempt that is repeated writes the same bytes.

    It reads zstd to its end, too.
    """
    from fsspec.compression import compr, register_compression

    before = compr["gzip"]
    writer: Any = import_module("isal.igzip").IGzipFile if find_spec("isal") else gzip.GzipFile  # as fsspec chooses

    def opened(file: Any, mode: str = "rb", **options: Any) -> Any:
        if "w" not in mode:
            return before(file, mode=mode, **options)
        compressor = writer(filename="", mode="wb", fileobj=file, mtime=0, **options)
        compressor.myfileobj = file  # closed with it
        return compressor

    register_compression("gzip", opened, "gz", force=True)
    if (written := compr.get("zstd")) is not None:
        from opsd.trainer.data.texts import ZstdFrames

        def opened_zstd(file: Any, mode: str = "rb") -> Any:
            return (
                io.BufferedReader(ZstdFrames(file, Path(getattr(file, "name", "input.zst"))))
                if "r" in mode
                else written(file, mode=mode)
            )

        register_compression("zstd", opened_zstd, "zst", force=True)
