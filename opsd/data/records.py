"""The state of a run of a pipeline: files below its folder, and nothing else.

==============================  ===============================================================================
file                            content
==============================  ===============================================================================
run.json                        the file of the pipeline, and the folder in which it runs
stage-01/plan.json              steps, tasks and inputs of the stage
stage-01/tasks/00007.json       what a finished task has written, read and counted; one attempt can create it
stage-01/attempts/00007.*.json  when and where an attempt ran, and how it ended
stage-01/done.json              the whole stage, once everything was checked
stage-01/log/                   the logs of datatrove and of the tasks
==============================  ===============================================================================
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from opsd import durable
from opsd.checkpoints.manifest import checksum
from opsd.data.pipeline import PipelineError

RUN, PLAN, DONE = "run.json", "plan.json", "done.json"
TASKS, ATTEMPTS, ARRAYS, LOG = "tasks", "attempts", "arrays", "log"
SUCCESSFUL: Final = ("done", "superseded")
"""How an attempt ends that has not failed; superseded is one that another attempt was faster than."""
FAILED: Final = "failed"
"""The outcome of an attempt that an exception ended, or the end of its own process."""
_NOTE_BYTES: Final = 4096
"""Of the file of an attempt from its beginning on: a page of memory, a block of the disk."""
BEAT_S: Final = 10.0
"""How often a living attempt says that it lives."""

Listing = dict[str, tuple[int, str]]
"""Size in bytes and stamp of each file of a folder: its modification time, or its ETag in an object store."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that a task has written below ``folder``; ``stamp`` is its time of modification in nanoseconds."""

    folder: str
    name: str
    size: int
    checksum: str
    stamp: int

    @property
    def path(self) -> Path:
        """Where it belongs."""
        return Path(self.folder, self.name)


@dataclass(slots=True)
class Flow:
    """Documents and bytes (UTF-8) at one step: what came and was made is what went out and was dropped.

    ``edited`` is by how many bytes the step has changed the documents that it passed on. A step that is
    ``consumed`` passes nothing on, and what came is in its files.
    """

    step: str
    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    documents_made: int = 0
    bytes_made: int = 0
    edited: int = 0
    consumed: bool = False
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def documents_dropped(self) -> int:
        """Those that neither went out nor are in files of the step."""
        return 0 if self.consumed else self.documents_in + self.documents_made - self.documents_out

    @property
    def bytes_dropped(self) -> int:
        """Of those documents."""
        return 0 if self.consumed else self.bytes_in + self.bytes_made + self.edited - self.bytes_out

    def add(self, other: Flow) -> None:
        """Count what ``other``, the same step in another task, has counted."""
        for name, value in asdict(other).items():
            if isinstance(value, int) and not isinstance(value, bool):
                setattr(self, name, getattr(self, name) + value)
        self.consumed = self.consumed or other.consumed
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count


@dataclass(frozen=True, slots=True)
class Done:
    """The record of a finished task. ``reads`` has the files that it has opened, by folder."""

    rank: int
    plan: str
    attempt: str
    files: tuple[Written, ...]
    reads: Mapping[str, Sequence[str]]
    flows: tuple[Flow, ...]

    @staticmethod
    def parse(raw: Mapping[str, Any]) -> Done:
        """Raises KeyError, TypeError."""
        return Done(
            raw["rank"], raw["plan"], raw["attempt"], tuple(Written(**each) for each in raw["files"]), raw["reads"],
            tuple(Flow(**each) for each in raw["flows"]),
        )  # fmt: skip


@dataclass(slots=True)
class Attempt:
    """One try at a task. ``seen`` is when it was last known to live, ``outcome`` is "" while it runs or if it was lost.

    ``why`` is in words how one that was not successful has ended, "" if that is not known.
    ``error`` is what has ended it, if that may well come again: not for a full disk, which ``errno`` names.
    """

    rank: int
    token: str = field(default_factory=lambda: secrets.token_hex(6))
    host: str = field(default_factory=lambda: os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    job: int = 0
    array: str = ""
    began: float = field(default_factory=time.time)
    seen: float = field(default_factory=time.time)
    cpus: int = 1
    outcome: str = ""
    why: str = ""
    error: str = ""
    errno: int = 0

    @property
    def seconds(self) -> float:
        """How long it is known to have run."""
        return max(0.0, self.seen - self.began)


class StageFolder:
    """The files of one stage."""

    def __init__(self, root: Path, number: int) -> None:
        self.folder = root / f"stage-{number:02d}"
        self.number = number

    def make(self) -> None:
        """Create it. Raises OSError."""
        for name in (TASKS, ATTEMPTS, ARRAYS, LOG):
            durable.make_folder(self.folder / name)

    @property
    def plan(self) -> dict[str, Any] | None:
        """Its plan, None before it has begun. Raises PipelineError."""
        return read_json(self.folder / PLAN)

    @property
    def done(self) -> dict[str, Any] | None:
        """Its summary, once it is complete. Raises PipelineError."""
        return read_json(self.folder / DONE)

    def record(self, rank: int) -> Path:
        """The file of a finished task."""
        return self.folder / TASKS / f"{rank:05d}.json"

    def finished(self) -> set[int]:
        """The tasks that have a record."""
        with suppress(FileNotFoundError):
            return {int(name[:-5]) for name in os.listdir(self.folder / TASKS) if name[:-5].isdigit()}  # noqa: PTH208
        return set()

    def records(self) -> list[Done]:
        """The records of all finished tasks, by rank. Raises PipelineError."""
        return [self.read(rank) for rank in sorted(self.finished())]

    def read(self, rank: int) -> Done:
        """Raises PipelineError."""
        raw = read_json(self.record(rank))
        try:
            return Done.parse(raw or {})
        except (KeyError, TypeError) as error:
            raise PipelineError(f"{self.record(rank)} is damaged ({error!r}): remove it, and run again") from error

    def attempts(self) -> list[Attempt]:
        """All attempts, the oldest first. One whose file is being written is left out."""
        found = []
        with suppress(FileNotFoundError):
            for path in (self.folder / ATTEMPTS).glob("*.json"):
                with suppress(OSError, ValueError, TypeError):
                    found.append(Attempt(**json.loads(path.read_text(encoding="utf-8"))))
        return sorted(found, key=lambda attempt: attempt.began)

    def note(self, attempt: Attempt) -> None:
        """Write an attempt down, by one call and in place: that leaves no draft, and a full disk has room for it.

        Not for a power loss. Raises OSError.
        """
        path = self.folder / ATTEMPTS / f"{attempt.rank:05d}.{attempt.token}.json"
        content = json.dumps(asdict(attempt)).encode().ljust(_NOTE_BYTES)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb", buffering=0) as file:
                file.write(content)
                file.truncate()
        except OSError as error:
            error.filename = str(path)
            raise

    def forget(self, ranks: Sequence[int] | None = None) -> None:
        """Remove the records of ``ranks``, or of all, with the files that they have written. Raises OSError."""
        with suppress(FileNotFoundError):
            (self.folder / DONE).unlink()
        for rank in sorted(self.finished()) if ranks is None else ranks:
            done = self.read(rank)
            self.record(rank).unlink(missing_ok=True)
            for file in done.files:
                file.path.unlink(missing_ok=True)
        durable.sync_folder(self.folder / TASKS)
        if ranks is None:
            (self.folder / PLAN).unlink(missing_ok=True)


def waiting_room(place: str) -> Path:
    """Where files of the output folder ``place`` are made ready: beside it, or beside what it links to."""
    path = Path(place).resolve()
    return path.with_name(f".{path.name}.opsd")


def aside(place: str, rank: int, attempt: str) -> Path:
    """Where an attempt writes what belongs into the folder ``place``, on the same file system."""
    return waiting_room(place) / f"{rank:05d}-{attempt}"


def publish(done: Done) -> None:
    """Move the files of a finished task into place, as far as they are not there yet. Raises OSError."""
    folders = set()
    for file in done.files:
        ready = aside(file.folder, done.rank, done.attempt) / file.name
        if ready.exists():
            durable.make_folder(file.path.parent)
            with suppress(FileNotFoundError):  # another process moves them too
                durable.rename(ready, file.path)
            folders.add(file.path.parent)
    for folder in folders:
        durable.sync_folder(folder)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a record; None if there is none. Raises PipelineError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PipelineError(f"{path} cannot be read ({error}): remove it, and run again") from error
    return found if isinstance(found, dict) else {}


def write_json(path: Path, content: object) -> None:
    """Raises OSError."""
    durable.replace(path, json.dumps(content).encode())


def listing(place: str) -> Listing:
    """The files of a folder; empty if it does not exist. Raises OSError."""
    if "://" in place:
        return _remote(place)
    found: Listing = {}
    for top, _, names in os.walk(place, onerror=_refuse):
        for name in names:
            path = os.path.join(top, name)  # noqa: PTH118  # a hundred thousand of them
            with suppress(FileNotFoundError):  # a link to nothing, or removed a moment ago
                about = os.stat(path)  # noqa: PTH116
                if stat.S_ISREG(about.st_mode):
                    found[os.path.relpath(path, place)] = (about.st_size, str(about.st_mtime_ns))
    return found


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _remote(place: str) -> Listing:
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(place)
    found = fs.find(path, detail=True)
    root = path.rstrip("/") + "/"
    return {
        name.removeprefix(root): (about.get("size") or 0, str(about.get("ETag") or about.get("LastModified") or ""))
        for name, about in found.items()
    }


def damage(file: Written) -> str:
    """Why a file is not what its task has written, "" if it is. A content that is the same may have another time."""
    try:
        about = file.path.stat()
    except OSError as error:
        return f"{file.path} is missing" if isinstance(error, FileNotFoundError) else f"{file.path}: {error.strerror}"
    if about.st_size != file.size:
        kind = "truncated" if about.st_size < file.size else "longer than it was"
        return f"{file.path} is {kind}: {about.st_size:,} bytes, its task has written {file.size:,}"
    if about.st_mtime_ns != file.stamp and checksum(file.path) != file.checksum:
        return f"{file.path} has another content than its task has written"
    return ""


def doubled(place: str, files: Listing) -> Iterator[str]:
    """Files of the folder that have the same content as another one of it."""
    if "://" in place:
        return
    by_size: dict[int, list[str]] = {}
    for name, (size, _) in files.items():
        by_size.setdefault(size, []).append(name)
    for size, names in by_size.items():
        seen: dict[str, str] = {}
        for name in sorted(names) if size and len(names) > 1 else ():
            found = checksum(Path(place, name))
            if found in seen:
                yield f"{Path(place, name)} has the content of {seen[found]}"
            seen.setdefault(found, name)
