"""The part of a checkpoint that one rank writes: its file, and what its persist process has to know."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from opsd import durable
from opsd.checkpoints.manifest import FileEntry
from opsd.checkpoints.retention import PART
from opsd.durable import DRAFT

STORAGE_RETRY_S = 60.0
"""How long to retry: a restarting file server returns errors for a while (ESTALE, EIO on a soft mount)."""
_FIRST_RETRY_S, _RETRY_S = 0.05, 1.0
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""What a restarting file server answers."""
_BLOCK = 1 << 24
_PAGE = mmap.PAGESIZE


Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class PersistPlan:
    """The parameters of a persist process.

    ``memory`` is the descriptor of the staged file, ``size`` its length in bytes, ``locks`` the descriptor from
    ``hold_lock``, ``shared`` the folder in shared memory that contains the staged file, if it does. The newest ``keep``
    checkpoints and those of every ``every``-th step are kept. So are those still to be uploaded to ``remote`` (the URL
    with its password is in OPSD_REMOTE) or ``evaluated``. Without ``writers`` every rank writes a file; a rank outside
    ``writers`` holds nothing that others do not.

    A replica of the staged state goes to ``target``, that of rank ``source`` arrives at ``listener``; see
    ``opsd.trainer.replica``. Unreadable claims are retried for ``patience_s``; then the save fails and the training
    goes on.
    """

    root: str
    rank: int
    world: int
    attempt: str
    layout: dict[str, int]
    run: str
    keep: int
    memory: int = -1
    size: int = 0
    locks: int = -1
    shared: str = ""
    every: int = 0
    remote: str = ""
    evaluated: bool = False
    writers: tuple[int, ...] = ()
    target: str = ""
    source: int = -1
    listener: int = -1
    patience_s: float = STORAGE_RETRY_S

    @property
    def parts(self) -> Sequence[int]:
        """The ranks that write a file."""
        return self.writers or range(self.world)


def with_retries(look: Callable[[], Found], patience_s: float = STORAGE_RETRY_S) -> Found:
    """The result of ``look`` at the shared storage, retried for ``patience_s`` while it fails. Raises OSError."""
    deadline, wait_s = time.monotonic() + patience_s, _FIRST_RETRY_S
    while True:
        try:
            return look()
        except OSError as error:
            if error.errno not in _PASSING or time.monotonic() >= deadline:
                raise
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _RETRY_S)


def write_part(folder: Path, plan: PersistPlan, save: str, view: memoryview, digest: str) -> FileEntry:
    """Write this rank's staged file for ``save``, and then give it the name under which the first rank finds it.

    The part may be committed from then on, and only the first rank may remove it. Its content is durable; the first
    rank makes its name durable before the commit. Raises OSError if the part does not have its name.
    """
    draft = _draft_of(folder, plan, save)
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, plan.size)
            _write(descriptor, view[: plan.size])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        name = f"rank-{plan.rank:04d}.{save}.{digest.partition(':')[2]}.safetensors"
        durable.rename(draft, folder / name)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    return FileEntry(name, plan.size, digest)


def _write(descriptor: int, view: memoryview) -> None:
    """Bypass the page cache as far as the file system allows: for whole pages from page-aligned memory.

    Each write says where: one that failed may have moved the descriptor's position all the same.
    """
    at = 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with suppress(OSError):  # the file system has only buffered files
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while len(view) - at >= _PAGE and at % _PAGE == 0:
            end = min(at + _BLOCK, len(view) // _PAGE * _PAGE)
            at += os.pwrite(descriptor, view[at:end], at)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    while at < len(view):
        at += os.pwrite(descriptor, view[at : at + _BLOCK], at)


def parts_of(folder: Path, save: str) -> dict[int, FileEntry]:
    """The parts of ``save`` in ``folder`` so far, by rank. Raises OSError."""
    parts = {}
    for path in folder.iterdir():
        match = PART.fullmatch(path.name)
        if match and match[2] == save:
            parts[int(match[1])] = FileEntry(path.name, path.stat().st_size, f"xxh3_128:{match[3]}")
    return parts


def remove_parts(folder: Path, save: str, rank: int | None = None) -> None:
    """Remove the parts of a ``save`` that will never be committed, or that of ``rank``, and the folder if it is empty.

    ``opsd.checkpoints.retention.prune`` removes later what cannot be removed now.
    """
    with suppress(OSError):
        for of_rank, part in parts_of(folder, save).items():
            if rank in (None, of_rank):
                (folder / part.name).unlink(missing_ok=True)
        folder.rmdir()


def _draft_of(folder: Path, plan: PersistPlan, save: str) -> Path:
    """The name of this rank's file while it is incomplete."""
    return folder / f".rank-{plan.rank:04d}.{save}{DRAFT}"
