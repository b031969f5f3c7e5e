"""The persist process of a rank: writes staged checkpoints to disk. Standard library and xxhash only.

It first computes the checksum of the staged state, which makes the copy in memory a checkpoint
(``opsd.trainer.memory``). Then it writes the state past the page cache, to leave processor and memory to the training.

Commands arrive on standard input, one JSON object per line, and are answered on standard output::

    {"save": STEP, "sample": SAMPLE, "digest": DIGEST}  ->  {"state": "committed"} | {"state": "failed", "why": ...}
    {"abandon": STEP}                                   ->  {"state": "abandoned"}

When ranks die: the staged copy is complete, so the process finishes its checkpoint and then ends, within ``LIMIT_S``.
The first rank's process uses the locks that it shares with its rank (``opsd.trainer.locks``) to distinguish a part that
is still being written from one that never will be. The next generation uses them to wait for saves in flight before it
chooses a checkpoint. File names contain the attempt, a random number for each start of the run, so that parts of two
generations never mix. Once a later generation has been claimed (``opsd.checkpoints.claims``), nothing of an earlier one
is committed.
"""

from __future__ import annotations

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
from typing import Any

from opsd.checkpoints import remote
from opsd.checkpoints.claims import Fence
from opsd.checkpoints.manifest import CheckpointError, FileEntry, Manifest, commit, folder_of, read
from opsd.checkpoints.retention import AWAITED, prune
from opsd.trainer.locks import POLL_S, locked
from opsd.trainer.memory import StateInfo, checksum, write_info
from opsd.trainer.parts import PersistPlan, discard, parts_of, write_part
from opsd.trainer.replica import KEY, Receiver, Sender

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
            print(f"opsd: the checkpoint is not kept in memory: {error}", file=sys.stderr)
    return info


def _save(plan: PersistPlan, memory: mmap.mmap, info: StateInfo, commands: Commands) -> dict[str, str]:
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
        discard(folder, plan, part)
        if isinstance(error, Abandoned):
            return {"state": "abandoned"}
        why = "another start of the run has committed it" if isinstance(error, FileExistsError) else error.strerror
        return {"state": "failed", "why": f"{folder}: {why}"}
    return {"state": "committed"}


def _prune(plan: PersistPlan) -> None:
    try:
        prune(Path(plan.root), plan.keep, plan.every)
    except OSError as error:
        print(f"opsd: old checkpoints could not be removed: {error}", file=sys.stderr)


def _upload(plan: PersistPlan, running: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes] | None:
    """Upload all waiting checkpoints, unless an upload is running."""
    if not plan.remote or (running is not None and running.poll() is None):
        return running
    command = [sys.executable, "-m", "opsd.checkpoints.remote", "upload", plan.root]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _finish_uploads(plan: PersistPlan, running: subprocess.Popen[bytes], *, is_behind: bool) -> None:
    """Wait for the running upload, and if it ``is_behind``, for another one of what was committed meanwhile.

    No save is in flight any more, so the next generation need not wait.
    """
    signal.alarm(remote.LIMIT_S)
    if plan.locks >= 0:
        os.close(plan.locks)
    running.wait()
    if is_behind and (last := _upload(plan, None)) is not None:
        last.wait()


def _await(folder: Path, plan: PersistPlan) -> None:
    """Mark what has to happen with the checkpoint before it may be removed."""
    wanted = (plan.remote, plan.evaluated)
    for name in (name for name, is_wanted in zip(AWAITED, wanted, strict=True) if is_wanted):
        (folder / name).touch()


def _write_into(folder: Path, plan: PersistPlan, view: memoryview, digest: str) -> FileEntry:
    try:
        return write_part(folder, plan, view, digest)
    except FileNotFoundError:  # a rank that gave up has taken the empty folder away; what it met this one is to meet
        folder.mkdir(parents=True, exist_ok=True)
        return write_part(folder, plan, view, digest)


def _gather(folder: Path, plan: PersistPlan, commands: Commands) -> tuple[FileEntry, ...]:
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
    """Wait for a manifest that has a file whose name contains ``name``."""
    while not commands.closed:
        with suppress(CheckpointError):
            if any(name in entry.name for entry in read(folder).files):
                return
        _wait(commands)


def _wait(commands: Commands) -> None:
    command = commands.next(POLL_S)
    if command and "abandon" in command:
        raise Abandoned


if __name__ == "__main__":
    main()
