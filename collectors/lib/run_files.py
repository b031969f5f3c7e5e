"""Files of runs that users write, opened with the rights of their owner.

Opening what a user has named, with that user's rights, while the agent may open anything.

Each part of the path is opened and judged as the kernel would for the user (path_resolution(7), acl(5)), and what was
judged is what is then read. Becoming the user would need privileges that the agent has no other use for.

Following files that somebody else writes, possibly a user while the reader is root.

Nothing here follows a symbolic link, blocks on a pipe, enters what is mounted over a file, or reads without a bound.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import struct
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from opsd.collectors.base import Event, RunFact
from opsd.collectors.lib.processes import read_kernel_text
from opsd.inodes import open_beside

READ: Final = 4
SEARCH: Final = 1
_MAX_LINKS: Final = 40
_PART: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ACL_ENTRY: Final = struct.Struct("<HHI")
_ACL_HEADER: Final = 4
_USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x02, 0x04, 0x08, 0x10, 0x20


class Rights(NamedTuple):
    """A user and the groups that the user is in."""

    user: int
    groups: frozenset[int]

    def allow(self, descriptor: int, wanted: int) -> bool:
        """Whether the user may do what the bits ``wanted`` say with an open inode. Raises OSError."""
        info = os.fstat(descriptor)
        if self.user == 0:
            return True
        if info.st_uid == self.user:
            return (info.st_mode >> 6) & wanted == wanted
        try:
            acl = os.getxattr(f"/proc/self/fd/{descriptor}", "system.posix_acl_access")
        except OSError:
            acl = b""
        if acl:
            return self._allowed_by(acl, info.st_gid, wanted)
        return (info.st_mode >> (3 if info.st_gid in self.groups else 0)) & wanted == wanted

    def _allowed_by(self, acl: bytes, group: int, wanted: int) -> bool:
        """The access check algorithm of acl(5), for a user who is not the owner."""
        entries: list[tuple[int, int, int]] = list(_ACL_ENTRY.iter_unpack(acl[_ACL_HEADER:]))
        mask = next((bits for tag, bits, _ in entries if tag == _MASK), 7)
        named = [bits & mask for tag, bits, who in entries if tag == _USER and who == self.user]
        if named:
            return named[0] & wanted == wanted
        groups = [
            bits & mask
            for tag, bits, who in entries
            if (tag == _GROUP_OBJ and group in self.groups) or (tag == _GROUP and who in self.groups)
        ]
        if groups:
            return any(bits & wanted == wanted for bits in groups)
        return any(bits & wanted == wanted for tag, bits, _ in entries if tag == _OTHER)


def groups_of_process(pid: int, user: int) -> frozenset[int]:
    """The groups of a process of ``user``; none if it is gone or another user's (proc_pid_status(5))."""
    try:
        lines = read_kernel_text(Path("/proc") / str(pid) / "status").split("\n")
        found = {name: words.split() for name, _, words in (line.partition(":") for line in lines)}
        if int(found["Uid"][0]) == user:
            return frozenset(map(int, (found["Gid"][0], *found["Groups"])))
    except (OSError, KeyError, ValueError, IndexError):
        pass
    return frozenset()


def open_as(rights: Rights, path: str, flags: int) -> int:
    """Open ``path``, absolute, for reading with ``flags`` if the user may. Raises OSError as open(2) would.

    With O_NOFOLLOW the path must not end in a symbolic link.
    """
    at = os.open("/", _PART | os.O_DIRECTORY)
    try:
        parts, links = deque(_parts(path)), 0
        while parts:
            if stat.S_ISDIR(os.fstat(at).st_mode) and not rights.allow(at, SEARCH):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            found = os.open(parts.popleft(), _PART, dir_fd=at)
            if not stat.S_ISLNK(os.fstat(found).st_mode):
                os.close(at)
                at = found
                continue
            links += 1
            target = _target(found)
            if links > _MAX_LINKS or (flags & os.O_NOFOLLOW and not parts):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            parts.extendleft(reversed(_parts(target)))
            if target.startswith("/"):
                os.close(at)
                at = os.open("/", _PART | os.O_DIRECTORY)
        if not rights.allow(at, READ):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return os.open(f"/proc/self/fd/{at}", (flags | os.O_CLOEXEC) & ~os.O_NOFOLLOW)
    finally:
        os.close(at)


def _target(link: int) -> str:
    try:
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


MAX_LINE: Final = 128 << 10
"""Longer lines are skipped."""
CHUNK: Final = 256 << 10
"""Most that is read from one file at a time; the rest waits for the next call."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK


class LineCutter:
    """Puts lines together from chunks that were cut anywhere."""

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max = max_line
        self._rest = b""
        self._skipping = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines completed by ``chunk``, without their line ends. Empty lines and those too long are left out."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if lines and self._skipping:
            self._skipping = False
            del lines[0]
        if len(self._rest) > self._max:
            self._skipping, self._rest = True, b""
        elif self._skipping:
            self._rest = b""
        return [line for line in lines if 0 < len(line) <= self._max]


class Tail:
    """The lines appended to a file, each exactly once; a file that was replaced is read from its start.

    A file is read only if the user of ``rights`` could read it: a name may be a hard link to another's file.
    """

    def __init__(self, name: str, rights: Rights) -> None:
        self._name = name
        self._rights = rights
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._cutter = LineCutter()

    def skip(self, folder: int) -> None:
        """Pass over what the file holds already. ``folder`` is open."""
        try:
            descriptor = open_beside(self._name, folder, os.O_PATH)
        except OSError:
            return
        info = os.fstat(descriptor)
        os.close(descriptor)
        self._file, self._offset, self._cutter = (info.st_dev, info.st_ino), info.st_size, LineCutter()

    def read(self, folder: int, limit: int = CHUNK) -> list[bytes]:
        """The complete lines added since the last call; none if there is no such regular file. ``folder`` is open.

        At most ``limit`` bytes are read, and never more than ``CHUNK``.
        """
        if limit <= 0:
            return []
        try:
            descriptor = open_beside(self._name, folder, _FLAGS)
        except OSError:
            return []
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode) or not self._rights.allow(descriptor, READ):
                return []
            if self._file != (info.st_dev, info.st_ino) or info.st_size < self._offset:
                self._file, self._offset, self._cutter = (info.st_dev, info.st_ino), 0, LineCutter()
            chunk = os.pread(descriptor, min(limit, CHUNK), self._offset)
        except OSError:
            return []
        finally:
            os.close(descriptor)
        self._offset += len(chunk)
        return self._cutter.feed(chunk)


def read_small(name: str, folder: int, rights: Rights, limit: int = CHUNK) -> tuple[bytes, float] | None:
    """Content and modification time of a regular file of at most ``limit`` bytes, None if there is none.

    Also None if the user of ``rights`` could not read it.
    """
    try:
        descriptor = open_beside(name, folder, _FLAGS)
    except OSError:
        return None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
            return None
        if not rights.allow(descriptor, READ):
            return None
        return os.pread(descriptor, limit, 0), info.st_mtime
    except OSError:
        return None
    finally:
        os.close(descriptor)


# What launcher and ranks write about a run: ``run.json`` and the event files. Pure; the content belongs to a user.


RUN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""The folder of a run is called so; it becomes a label."""
RUN_STATES: Final = ("waiting", "running", "restarting", "stopping", "spare", "finished", "failed")
MAX_WORLD: Final = 1 << 20
"""Ranks that a run may claim to have: sets of them are made."""
MAX_NAME: Final = 64
"""Names of results and sources that are longer are left out."""
MAX_DIGITS: Final = 18
MAX_DEPTH: Final = 16
"""Digits of a whole number, and lists and objects inside one another, in what a user writes."""
EVENTS: Final = frozenset((
    "generation_started", "rank_exited", "hang_detected", "resumed", "checkpoint_committed", "stopped", "finished",
    "node_lost", "spare_joined", "checkpoint_rejected", "checkpoint_loaded", "data_worker_restarted",
    "tp_shards_equal", "replicas_differ", "replay_differs", "evaluation", "data_mixture", "straggler_found",
    "straggler_gone", "rollouts",
))  # fmt: skip
"""Events passed on. Any other is of no use here, and a user's file must not be able to speak for the hardware."""


def parse_event(line: bytes, run: str, now: float, **fields: object) -> Event | None:
    """One line of an event file, ``fields`` added to it; None if it is none of ``EVENTS``.

    No event is later than ``now``.
    """
    record = _parse_object(line)
    if record is None or not isinstance(name := record.get("event"), str) or name not in EVENTS:
        return None
    at = record.get("t")
    if not isinstance(at, int | float) or not 0 <= at <= now:
        at = now
    data = {**record, **fields, "run": run}
    who = f"rank {data['rank']} of {run}" if "rank" in data else run
    return Event(name, float(at), f"{name.replace('_', ' ')}: {who}"[:256], data)


def parse_run(content: bytes, run: str, find: Callable[[int, int], int | None]) -> RunFact | None:
    """The run as ``run.json`` describes it, None if that is no such file.

    ``find`` has the number here of the process with a number and start time, None if it does not live.
    """
    raw = _parse_object(content)
    try:
        if raw is None or raw["state"] not in RUN_STATES:
            return None
        pid = _count(raw["launcher_pid"])
        here = find(pid, _count(raw["launcher_start"]))
        return RunFact(
            run=run,
            job=str(raw["job"])[:64],
            node=str(raw["node"])[:64],
            state=raw["state"],
            generation=_count(raw["generation"]),
            launcher_pid=pid if here is None else here,
            alive=here is not None,
            world_size=_count(raw["world_size"], below=MAX_WORLD),
            control=_path(raw["control"]),
            folder=(folder := _path(raw["folder"])),
            logs=_path(raw.get("logs", f"{folder}/logs")),
        )
    except (ValueError, KeyError, TypeError):
        return None


def named_numbers(value: object, most: int) -> dict[str, float]:
    """Numbers by name as an event may hold them, the first ``most``: names are a user's, series are not free."""
    if not isinstance(value, Mapping):
        return {}
    found = {name: n for name in value if 0 < len(name) <= MAX_NAME and (n := number(value[name])) is not None}
    return {name: found[name] for name in sorted(found)[:most]}


def number(value: object) -> float | None:
    """``value`` as a finite number, None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def _parse_object(text: bytes) -> dict[str, Any] | None:
    """A JSON object that can be stored and sent on: no deep nesting, numbers fit in 64 bits, text is valid Unicode."""
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=_whole)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _is_shallow(value, MAX_DEPTH) else None


def _no_number(_: str) -> None:
    return None


def _finite(text: str) -> float | None:
    return number(float(text))


def _whole(text: str) -> int | None:
    return int(text) if len(text) <= MAX_DIGITS else None


def _is_shallow(value: object, depth: int) -> bool:
    """Whether ``value`` has at most ``depth`` containers inside one another."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(one, depth - 1) for one in inner)


def _path(value: object) -> str:
    path = str(value)[:4096]
    if "\0" in path:
        raise ValueError(f"not a path: {path[:80]!r}")
    return path


def _count(value: object, below: int = 1 << 48) -> int:
    if not isinstance(value, int) or not 0 <= value < below:
        raise ValueError(f"not a count: {value!r}")
    return value
