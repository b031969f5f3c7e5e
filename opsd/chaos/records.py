"""The faults in effect on this node: a small file per fault in shared memory, written by the fault's guard.

Each user has their own folder beside the runs' folder. Root sees all of them and undoes only its own, because root
must not execute what another user has written.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from opsd.chaos.undo import ChaosError, Process, decode

_UNDO_S: Final = 30.0
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """One fault: what it is, how long it lasts once it has begun, and how it is undone.

    ``began`` is in seconds since the epoch, None while the fault is being caused.
    """

    id: str
    fault: str
    text: str
    run: str
    for_s: float
    undo: dict[str, Any]
    began: float | None = None
    guard_pid: int = 0
    guard_start: int = 0

    @property
    def guard(self) -> Process:
        """The process that undoes it."""
        return Process(self.guard_pid, self.guard_start)

    @property
    def state(self) -> str:
        """Its state as ``opsd chaos list`` shows it."""
        if not self.guard.alive:
            return "left over: its guard is gone; opsd chaos undo ends it"
        if self.began is None:
            return "being caused"
        return f"in effect, {max(0.0, self.began + self.for_s - time.time()):.0f} s left"


def folder_of(root: Path, uid: int) -> Path:
    """Where the records of the user ``uid`` are, beside the runs' folder ``root``."""
    return root.absolute().with_name(f"{root.name}-chaos-{uid}")


def write(folder: Path, record: FaultRecord) -> None:
    """Write ``record``. Raises ChaosError if the folder belongs to another user, OSError if it cannot be written."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _owned(folder, os.getuid()):
        raise ChaosError(f"{folder} belongs to another user: remove it")
    draft = folder / f".{record.id}"
    draft.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
    draft.replace(folder / f"{record.id}.json")


def remove(folder: Path, record: FaultRecord) -> None:
    """Remove ``record``, and the folder with the last one."""
    with suppress(OSError):
        (folder / f"{record.id}.json").unlink(missing_ok=True)
        folder.rmdir()


def find(root: Path) -> Iterator[tuple[int, FaultRecord]]:
    """The user and the record of every fault that this user may see. Other files are skipped."""
    for folder in sorted(root.absolute().parent.glob(f"{root.name}-chaos-*")):
        uid = int(number) if (number := folder.name.rpartition("-")[2]).isdigit() else -1
        if not _owned(folder, uid):
            continue
        with suppress(PermissionError):
            for file in sorted(folder.glob("*.json")):
                with suppress(OSError, ValueError, TypeError):
                    yield uid, FaultRecord(**json.loads(_read(file)))


def end(folder: Path, record: FaultRecord) -> str:
    """Tell the guard to undo the fault of ``record``, or undo it here if the guard is gone; returns what was done.

    Raises ChaosError and OSError.
    """
    if record.guard.signal(signal.SIGTERM):
        deadline = time.monotonic() + _UNDO_S
        while record.guard.alive:
            if time.monotonic() > deadline:
                raise ChaosError(f"the guard of {record.id}, process {record.guard_pid}, does not end")
            time.sleep(0.01)
        if (folder / f"{record.id}.json").exists():
            raise ChaosError(f"the guard of {record.id} could not undo it: try again")
        return "undone by its guard"
    said = decode(record.undo).undo()
    remove(folder, record)
    return said


def _owned(folder: Path, uid: int) -> bool:
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == uid


def _read(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(descriptor, _MAX_BYTES).decode()
    finally:
        os.close(descriptor)
