"""The persist process of a rank: writes staged checkpoints to disk. Standard library and xxhash, nothing heavier.

It first takes the checksum of the staged state, with which the copy in memory is a checkpoint
(``opsd.trainer.memory``), and then writes it past the page cache, so that neither processor nor memory is taken from
the training.

It takes orders, one JSON object a line, on standard input and answers on standard output::

    {"save": STEP, "sample": SAMPLE, "digest": DIGEST}  ->  {"state": "committed"} | {"state": "failed", "why": ...}
    {"abandon": STEP}                                   ->  {"state": "abandoned"}

What happens when ranks die. The staged copy is complete, so the process finishes the checkpoint it has in hand and then
ends; ending is bounded, see ``LIMIT_S``. The first rank's process uses the locks that it shares with its rank
(``opsd.trainer.locks``) to tell a part that is still to come from one that never will; the next generation uses them to
wait for saves in flight before it chooses a checkpoint. File names carry the attempt, a random number of each start of
the run, so that parts of two generations never mix. Once a later generation has been claimed
(``opsd.checkpoints.claims``) nothing of an earlier one is committed any more.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsd.checkpoints import remote
from opsd.checkpoints.claims import Fence
from opsd.checkpoints.manifest import CheckpointError, FileEntry, Manifest, commit, folder_of, read, sync_folder
from opsd.checkpoints.retention import AWAITED, prune
from opsd.trainer.locks import POLL_S, locked
from opsd.trainer.memory import StateInfo, checksum, write_info
from opsd.trainer.replica import KEY, Receiver, Sender

LIMIT_S = 600
"""A process whose rank has gone ends after this, come what may; after ``remote.LIMIT_S`` if it only uploads."""
CLAIMS_S = 60.0
"""A file server that restarts answers with errors for a while (ESTALE, EIO on a soft mount)."""
_BLOCK = 1 << 24
_PAGE = mmap.PAGESIZE
_PART = re.compile(r"rank-(\d{4,})\.([0-9a-f]{8})\.([0-9a-f]{32})\.safetensors")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a persist process needs to know.

    ``memory`` is the descriptor of the staged file, ``size`` its length in bytes, ``locks`` what ``hold_lock`` gave,
    ``shared`` the folder in shared memory in which the staged file lies, if it does. Besides the newest ``keep``
    checkpoints those of every ``every``-th step are kept, and those that have yet to be uploaded to ``remote`` (the URL
    with its password is in OPSD_REMOTE) or ``evaluated``. Without ``writers`` every rank writes a file; who does not
    has nothing that the others have not.
    A copy of what is staged goes to ``target``, that of rank ``source`` comes to ``listener``, as
    ``opsd.trainer.replica`` says.
    Claims that cannot be read are tried again for ``patience_s``; then the save has failed and the training goes on.
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
    patience_s: float = CLAIMS_S

    @property
    def parts(self) -> Sequence[int]:
        """The ranks that write a file."""
        return self.writers or range(self.world)


class Abandoned(Exception):
    """The checkpoint in hand cannot be completed, because the part of another rank is missing."""


class Commands:
    """The lines on a descriptor. ``closed`` once the other side has gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._rest = b""
        self.closed = False

    def next(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next order; None when there is none within ``timeout_s`` or the other side has gone."""
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
        """Whether the other side has gone, at the latest ``timeout_s`` from now; orders meanwhile are passed over."""
        self.next(timeout_s)
        return self.closed


def main() -> None:
    """Serve orders until the rank is gone and nothing is left to be done."""
    plan = Plan(**json.loads(sys.argv[1]))
    os.nice(5)
    commands = Commands(0)
    upload: subprocess.Popen[bytes] | None = None
    is_behind = False
    key = bytes.fromhex(os.environ.pop(KEY, ""))
    if plan.listener >= 0:
        keeper = Receiver(key, Path(plan.shared), plan.source, plan.attempt)
        arguments = (socket.socket(fileno=plan.listener),)
        threading.Thread(target=keeper.serve, args=arguments, daemon=True).start()
    with mmap.mmap(plan.memory, plan.size) as memory:
        while not commands.closed:
            command = commands.next()
            if command and "save" in command:
                info = _declare(plan, memory, command)
                sending = Sender(plan.target, key, info, memory) if plan.target else None
                if sending is not None:
                    sending.start()
                answer = _save(plan, memory, info, commands)
                if sending is not None:
                    sending.finish(commands.wait_closed)
                    answer["copy"] = sending.why
                with suppress(BrokenPipeError):
                    os.write(1, json.dumps(answer).encode() + b"\n")
                if plan.rank == 0 and answer["state"] == "committed":
                    _prune(plan)
                    running, upload = upload, _upload(plan, upload)
                    is_behind = upload is running
    if upload is not None:
        _finish_uploads(plan, upload, is_behind=is_behind)


def _declare(plan: Plan, memory: mmap.mmap, command: Mapping[str, Any]) -> StateInfo:
    """With its checksum taken, the copy in memory is a checkpoint."""
    with memoryview(memory) as view:
        info = StateInfo(
            plan.rank, command["save"], command["sample"], command["digest"], plan.attempt, plan.layout, plan.size,
            checksum(view), plan.run, time.time(),
        )  # fmt: skip
    if plan.shared:
        try:
            write_info(Path(plan.shared), info)
        except OSError as error:
            print(f"opsd: the checkpoint is not kept in memory: {error}", file=sys.stderr)
    return info


def _save(plan: Plan, memory: mmap.mmap, info: StateInfo, commands: Commands) -> dict[str, str]:
    folder = folder_of(Path(plan.root), info.step)
    part = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if plan.rank in plan.parts:
            with memoryview(memory) as view:
                part = _write_into(folder, plan, view, info.checksum)
        if plan.rank == 0:
            files = _gather(folder, plan, commands)
            manifest = Manifest(info.step, info.sample, plan.layout, info.digest, files, "local", time.time(), plan.run)
            _await(folder, plan)
            if fence := Fence.of(os.environ):
                fence.check(plan.patience_s)
            commit(folder, manifest)
        else:
            _await_commit(folder, part.name if part else f".{plan.attempt}.", commands)
    except (OSError, Abandoned) as error:
        _discard(folder, plan, part)
        if isinstance(error, Abandoned):
            return {"state": "abandoned"}
        why = "another start of the run has committed it" if isinstance(error, FileExistsError) else error.strerror
        return {"state": "failed", "why": f"{folder}: {why}"}
    return {"state": "committed"}


def _prune(plan: Plan) -> None:
    try:
        prune(Path(plan.root), plan.keep, plan.every)
    except OSError as error:
        print(f"opsd: old checkpoints could not be removed: {error}", file=sys.stderr)


def _upload(plan: Plan, running: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes] | None:
    """Have all that waits for it uploaded, unless that is going on."""
    if not plan.remote or (running is not None and running.poll() is None):
        return running
    command = [sys.executable, "-m", "opsd.checkpoints.remote", "upload", plan.root]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _finish_uploads(plan: Plan, running: subprocess.Popen[bytes], *, is_behind: bool) -> None:
    """Wait for the upload, which may take its time, and for one of what it ``is_behind``: was committed during it.

    No save is in hand any more, so the next generation need not wait.
    """
    signal.alarm(remote.LIMIT_S)
    if plan.locks >= 0:
        os.close(plan.locks)
    running.wait()
    if is_behind and (last := _upload(plan, None)) is not None:
        last.wait()


def _await(folder: Path, plan: Plan) -> None:
    """Mark what is needed of the checkpoint before it may go."""
    wanted = (plan.remote, plan.evaluated)
    for name in (name for name, is_wanted in zip(AWAITED, wanted, strict=True) if is_wanted):
        (folder / name).touch()


def _write_into(folder: Path, plan: Plan, view: memoryview, digest: str) -> FileEntry:
    try:
        return write_part(folder, plan, view, digest)
    except FileNotFoundError:  # a rank that gave up has taken the empty folder away; what it met this one is to meet
        folder.mkdir(parents=True, exist_ok=True)
        return write_part(folder, plan, view, digest)


def write_part(folder: Path, plan: Plan, view: memoryview, digest: str) -> FileEntry:
    """Write this rank's staged file durably, under a name that says its attempt and checksum. Raises OSError."""
    draft = _draft(folder, plan)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, plan.size)
        _write(descriptor, view[: plan.size])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    name = f"rank-{plan.rank:04d}.{plan.attempt}.{digest.partition(':')[2]}.safetensors"
    os.rename(draft, folder / name)
    sync_folder(folder)
    return FileEntry(name, plan.size, digest)


def _write(descriptor: int, view: memoryview) -> None:
    """Write past the page cache as far as the file system can, which is whole pages from page-aligned memory."""
    at = 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with suppress(OSError):  # the file system has only buffered files
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while len(view) - at >= _PAGE and at % _PAGE == 0:
            end = min(at + _BLOCK, len(view) // _PAGE * _PAGE)
            at += os.write(descriptor, view[at:end])
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    while at < len(view):
        at += os.write(descriptor, view[at : at + _BLOCK])


def parts_of(folder: Path, attempt: str) -> dict[int, FileEntry]:
    """The parts that ``attempt`` has written into ``folder`` so far, by rank."""
    parts = {}
    for path in folder.iterdir():
        match = _PART.fullmatch(path.name)
        if match and match[2] == attempt:
            parts[int(match[1])] = FileEntry(path.name, path.stat().st_size, f"xxh3_128:{match[3]}")
    return parts


def _gather(folder: Path, plan: Plan, commands: Commands) -> tuple[FileEntry, ...]:
    while True:
        # Locks before files: a process may finish its part and end in between.
        gone = {rank for rank in plan.parts if rank and commands.closed and not locked(plan.locks, rank, 1)}
        parts = parts_of(folder, plan.attempt)
        if len(parts) == len(plan.parts):
            return tuple(parts[rank] for rank in plan.parts)
        if gone - parts.keys():
            raise Abandoned
        _wait(commands)


def _await_commit(folder: Path, name: str, commands: Commands) -> None:
    """Wait for a manifest with files of which ``name`` is the name or a part of it."""
    while not commands.closed:
        with suppress(CheckpointError):
            if any(name in entry.name for entry in read(folder).files):
                return
        _wait(commands)


def _wait(commands: Commands) -> None:
    command = commands.next(POLL_S)
    if command and "abandon" in command:
        raise Abandoned


def _discard(folder: Path, plan: Plan, part: FileEntry | None) -> None:
    """Remove our own files of a checkpoint that failed, and its folder if nothing else is in it."""
    with suppress(OSError):
        _draft(folder, plan).unlink(missing_ok=True)
        if part is not None:
            (folder / part.name).unlink(missing_ok=True)
        folder.rmdir()


def _draft(folder: Path, plan: Plan) -> Path:
    return folder / f".rank-{plan.rank:04d}.{plan.attempt}.draft"


if __name__ == "__main__":
    main()
