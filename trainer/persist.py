"""The persist process of a rank: writes staged checkpoints to disk. Standard library and xxhash only.

It first computes the checksum of the staged state, which makes the copy in memory a checkpoint
(``opsd.trainer.memory``). Then it writes the state past the page cache, to leave processor and memory to the training.

Commands arrive on standard input, one JSON object per line, and are answered on standard output::

    {"save": STEP, "number": N, "sample": SAMPLE, "digest": DIGEST}  ->  {"state": STATE, "why": ...}
    {"abandon": STEP}

=========  ========================================================================================================
STATE      Meaning
=========  ========================================================================================================
committed  The checkpoint of the step exists; the first rank's process has also proved that it is durable.
unproved   The checkpoint exists, but the storage did not confirm that it is durable. The first rank's process says it.
failed     This rank's part could not be written, or the checkpoint could not be committed.
abandoned  The save was given up because of another rank.
=========  ========================================================================================================

The committed manifest is the only judge: after a failure a process first looks whether the checkpoint of the step
exists. The names of a save's files contain the attempt, a random number for each start of the run, and the number of
the save in it, so that parts of two saves never mix. A part that has its name may be committed at any moment, so its
owner no longer removes it. The first rank's process removes the parts of a save once it has given up the commit; a
part that gets its name later is removed by its owner with the next save, which begins after that decision.

When ranks die: the staged copy is complete, so the process finishes its checkpoint and then ends, within ``LIMIT_S``.
The first rank's process uses the locks that it shares with its rank (``opsd.trainer.locks``) to distinguish a part that
is still being written from one that never will be. The next generation uses them to wait for saves in flight before it
chooses a checkpoint. Once a later generation has been claimed (``opsd.checkpoints.claims``), nothing of an earlier one
is committed.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from opsd import durable
from opsd.checkpoints import remote
from opsd.checkpoints.claims import Fence
from opsd.checkpoints.manifest import (
    CheckpointError,
    FileEntry,
    Manifest,
    Unreadable,
    commit,
    folder_of,
    is_there,
    prove,
    read,
)
from opsd.checkpoints.retention import AWAITED, prune
from opsd.durable import Unproved
from opsd.jsonl import METRICS
from opsd.trainer.locks import POLL_S, locked
from opsd.trainer.memory import StateInfo, checksum, write_info
from opsd.trainer.parts import PersistPlan, parts_of, remove_parts, with_retries, write_part
from opsd.trainer.replica import KEY, Receiver, Sender
from opsd.words import of_file, remedy

MAKES = 9
LIMIT_S = 600
"""A process whose rank is gone ends after this in any case; after ``remote.LIMIT_S`` if it only uploads."""


class Abandoned(Exception):
    """The checkpoint cannot be completed, because another rank's part is missing."""


class Commands:
    """The lines on a descriptor. ``closed`` once the other side has closed it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._rest = b""
        self.closed = False

    def next(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next command; None if there is none within ``timeout_s`` or the other side has closed the descriptor."""
        if not self._lines and not self.closed and select.select([self._descriptor], [], [], timeout_s)[0]:
            received = os.read(self._descriptor, 1 << 16)
            if not received:
                self.closed = True
                signal.alarm(LIMIT_S)
            *lines, self._rest = (self._rest + received).split(b"\n")
            self._lines += lines
        if self._lines:
            command: dict[str, Any] = json.loads(self._lines.pop(0))
            return command
        if self.closed and timeout_s:
            time.sleep(timeout_s)
        return None

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the other side to close; whether it has. Commands that arrive are dropped."""
        self.next(timeout_s)
        return self.closed


def main() -> None:
    """Serve commands until the rank is gone and nothing is left to do."""
    plan = PersistPlan(**json.loads(sys.argv[1]))
    os.nice(5)
    commands = Commands(0)
    uploads = Uploads(plan)
    key = bytes.fromhex(os.environ.pop(KEY, ""))
    if plan.listener >= 0:
        keeper = Receiver(key, Path(plan.shared), plan.source, plan.attempt)
        arguments = (socket.socket(fileno=plan.listener),)
        threading.Thread(target=keeper.serve, args=arguments, daemon=True).start()
    with mmap.mmap(plan.memory, plan.size) as memory:
        writer = Writer(plan, memory, commands)
        while not commands.closed:
            command = commands.next()
            if command and "save" in command:
                info = _declare(plan, memory, command)
                sending = Sender(plan.target, key, info, memory) if plan.target else None
                if sending is not None:
                    sending.start()
                answer = writer.save(info, command["number"])
                if sending is not None:
                    sending.finish(commands.wait_closed)
                    answer["copy"] = sending.why
                with suppress(BrokenPipeError):
                    os.write(1, json.dumps(answer).encode() + b"\n")
                if plan.rank == 0 and answer["state"] == "committed":
                    _prune(plan)
                    uploads.begin()
    uploads.finish()


def _declare(plan: PersistPlan, memory: mmap.mmap, command: Mapping[str, Any]) -> StateInfo:
    """Compute the checksum, which makes the copy in memory a checkpoint."""
    with memoryview(memory) as view:
        info = StateInfo(
            plan.rank, command["save"], command["sample"], command["digest"], plan.attempt, plan.layout, plan.size,
            checksum(view), plan.run, time.time(),
        )  # fmt: skip
    if plan.shared:
        try:
            write_info(Path(plan.shared), info)
        except OSError as error:
            print(f"opsd: the checkpoint is not kept in memory: {of_file(error)}", file=sys.stderr)
    return info


class Place:
    """The folder of the checkpoints. Once it was moved, or its mount is gone, the same path is another place."""

    def __init__(self, root: Path) -> None:
        self._root, self._began = root, _identity(root)
        self._run = _identity(root.parent)
        self.newest = 0
        """The step of a checkpoint that is there; 0 if none is known."""

    def require(self) -> None:
        """Raises OSError if the run's folder is not there any more.

        A file system that is mounted again may have another device number, and some give a file a new inode number
        whenever they forget it. The last checkpoint then shows that it is the same folder.
        """
        now, began = _identity(self._root), self._began
        if now is not None and began is not None and now.inode == began.inode:
            return
        is_same_device = now is None or began is None or now.device == began.device
        if is_same_device and _identity(self._root.parent) == self._run:  # somebody has removed the checkpoints
            return
        if is_there(folder_of(self._root, self.newest)) if self.newest else now is not None and is_same_device:
            return
        raise OSError(errno.ESTALE, "the run's folder was moved, or its file system is no longer mounted here")


class _Identity(NamedTuple):
    device: int
    inode: int


def _identity(folder: Path) -> _Identity | None:
    """None if there is no such folder. Raises OSError."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return _Identity(found.st_dev, found.st_ino)


class Writer:
    """Makes checkpoints of this rank's staged state, together with the processes of the other ranks."""

    def __init__(self, plan: PersistPlan, memory: mmap.mmap, commands: Commands) -> None:
        self._plan, self._memory, self._commands = plan, memory, commands
        self._place = Place(Path(plan.root))
        self._undecided: tuple[Path, str] | None = None
        """Folder and name of the last save if this rank has written a part and has not seen it committed."""

    def save(self, info: StateInfo, number: int) -> dict[str, str]:
        """Save the state of ``info`` as the save ``number`` of this start; returns the answer to the command."""
        folder, save = folder_of(Path(self._plan.root), info.step), f"{self._plan.attempt}-{number}"
        why = ""
        try:
            self._place.require()
            self._remove_undecided()
            if _committed(folder, info) is None:
                self._settle(self._write(folder, save, info))
                return {"state": "committed"}
        except OSError as error:
            why = f"{folder}: {_reason(error)}"
        except Abandoned:
            pass
        return self._judged(folder, save, info, why)

    def _judged(self, folder: Path, save: str, info: StateInfo, why: str) -> dict[str, str]:
        """The answer after an earlier save of the step, or after the failure ``why``: the manifest decides."""
        patience_s = self._plan.patience_s
        try:
            found = with_retries(lambda: _committed(folder, info), patience_s)
            if found is not None:
                self._settle(found)
                if self._plan.rank == 0:
                    with_retries(lambda: prove(folder), patience_s)
                return {"state": "committed"}
        except Unproved as error:
            return {"state": "unproved", "why": of_file(error)}
        except OSError as error:
            return {"state": "failed", "why": why or f"{folder}: {_reason(error)}"}
        self._clean(folder, save)
        return {"state": "failed", "why": why} if why else {"state": "abandoned"}

    def _write(self, folder: Path, save: str, info: StateInfo) -> Manifest:
        """Write this rank's part and see it committed. Raises OSError, Abandoned."""
        plan = self._plan
        _make(folder)
        if plan.rank in plan.parts:
            with memoryview(self._memory) as view:
                self._undecided = folder, save
                _write_into(folder, plan, save, view, info.checksum)
        if plan.rank:
            return self._await_commit(folder, info)
        files = self._gather(folder, save)
        manifest = Manifest(info.step, info.sample, plan.layout, info.digest, files, "local", time.time(), plan.run)
        _await(folder, plan)
        if fence := Fence.of(os.environ):
            fence.check(plan.patience_s)
        _sync_metrics(Path(plan.root).parent / METRICS)
        commit(folder, manifest)
        return manifest

    def _gather(self, folder: Path, save: str) -> tuple[FileEntry, ...]:
        plan, commands = self._plan, self._commands
        while True:
            # Locks before files: a process may finish its part and end in between.
            gone = {rank for rank in plan.parts if rank and commands.closed and not locked(plan.locks, rank, 1)}
            parts = parts_of(folder, save)
            if len(parts) == len(plan.parts):
                return tuple(parts[rank] for rank in plan.parts)
            if gone - parts.keys():
                raise Abandoned
            self._wait()

    def _await_commit(self, folder: Path, info: StateInfo) -> Manifest:
        while not self._commands.closed:
            with suppress(OSError):
                if (found := _committed(folder, info)) is not None:
                    return found
            self._wait()
        raise Abandoned

    def _wait(self) -> None:
        command = self._commands.next(POLL_S)
        if command and "abandon" in command:
            raise Abandoned

    def _clean(self, folder: Path, save: str) -> None:
        """Remove what a save that is not committed has left, if this is the process that would commit it."""
        if self._plan.rank == 0:
            remove_parts(folder, save)
            self._undecided = None
        with suppress(OSError):  # something is in it
            folder.rmdir()

    def _settle(self, manifest: Manifest) -> None:
        """Remove this rank's part if ``manifest``, that of the step, is of another save."""
        self._place.newest = manifest.step
        if self._undecided is not None:
            folder, save = self._undecided
            if not any(save in entry.name for entry in manifest.files):
                remove_parts(folder, save, self._plan.rank)
            self._undecided = None

    def _remove_undecided(self) -> None:
        """Remove the part of the last save if that was not committed; the first rank has decided it. Raises OSError."""
        if self._undecided is not None:
            folder, save = self._undecided
            if is_there(folder):
                self._settle(_read(folder))
            else:
                remove_parts(folder, save, self._plan.rank)
                self._undecided = None


def _committed(folder: Path, info: StateInfo) -> Manifest | None:
    """The committed checkpoint of the same step, model and data, if there is one. Raises OSError if that is unknown."""
    if not is_there(folder):
        return None
    found = _read(folder)
    is_same = (found.step, found.sample, found.config_digest) == (info.step, info.sample, info.digest)
    return found if is_same else None


def _read(folder: Path) -> Manifest:
    """Raises OSError."""
    try:
        return read(folder)
    except Unreadable as error:
        raise OSError(errno.EIO, str(error)) from error
    except CheckpointError as error:
        raise OSError(errno.EINVAL, f"{error}; the next start of the run sets it aside") from error


def _reason(error: OSError) -> str:
    if isinstance(error, FileExistsError):
        return "another start of the run has committed another checkpoint of this step"
    return (error.strerror or str(error)) + remedy(error)


def _prune(plan: PersistPlan) -> None:
    try:
        prune(Path(plan.root), plan.keep, plan.every)
    except OSError as error:
        why = of_file(error)
        print(f"opsd: old checkpoints could not be removed: {why}; the next save tries again", file=sys.stderr)


class Uploads:
    """Uploads what is committed, one transfer at a time; nothing without a remote storage."""

    def __init__(self, plan: PersistPlan) -> None:
        self._plan = plan
        self._running: subprocess.Popen[bytes] | None = None
        self._is_behind = False

    def begin(self) -> None:
        """Upload all waiting checkpoints; those committed during an upload wait for the next one."""
        self._is_behind = self._running is not None and self._running.poll() is None
        if self._plan.remote and not self._is_behind:
            command = [sys.executable, "-m", "opsd.checkpoints.remote", "upload", self._plan.root]
            self._running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def finish(self) -> None:
        """Wait for the running upload, and for another one of what was committed meanwhile.

        No save is in flight any more, so the next generation need not wait.
        """
        if self._running is None:
            return
        signal.alarm(remote.LIMIT_S)
        if self._plan.locks >= 0:
            os.close(self._plan.locks)
        self._running.wait()
        if self._is_behind:
            self.begin()
            self._running.wait()


def _await(folder: Path, plan: PersistPlan) -> None:
    """Mark what has to happen with the checkpoint before it may be removed."""
    wanted = (plan.remote, plan.evaluated)
    for name in (name for name, is_wanted in zip(AWAITED, wanted, strict=True) if is_wanted):
        (folder / name).touch()


def _sync_metrics(file: Path) -> None:
    """Make the lines of the steps durable, since nobody repeats these steps once the checkpoint is committed."""
    try:
        with open(file, "rb") as opened:
            durable.sync(opened)
        durable.prove(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        print(f"opsd: {of_file(error)}: a power failure may take lines of steps", file=sys.stderr)


def _make(folder: Path) -> None:
    """Create ``folder``; another rank that gives up may remove it, empty, at any moment. Raises OSError."""
    for _ in range(MAKES):
        with suppress(FileExistsError):
            return folder.mkdir(parents=True, exist_ok=True)
    raise NotADirectoryError(errno.ENOTDIR, "a file has the name of the folder", str(folder))


def _write_into(folder: Path, plan: PersistPlan, save: str, view: memoryview, digest: str) -> None:
    try:
        write_part(folder, plan, save, view, digest)
    except FileNotFoundError:  # a rank that gave up has taken the empty folder away; what it met this one is to meet
        _make(folder)
        write_part(folder, plan, save, view, digest)


if __name__ == "__main__":
    main()
