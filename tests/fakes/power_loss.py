"""Programs whose file system fails, and what a power loss leaves.

Programs whose file system fails: the environment that preloads ``faults.c``, and the log of calls that it writes.
"""

from __future__ import annotations

import errno
import hashlib
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("faults.c")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS)


@cache
def library() -> Path:
    """The compiled library. The test is skipped on a machine without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"opsd-faults-{digest}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            draft = Path(folder) / built.name
            options = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
            subprocess.run([compiler, *options, "-o", draft, SOURCE, "-ldl"], check=True)
            draft.rename(built)
    return built


@dataclass(frozen=True, slots=True)
class Faults:
    """Which calls fail below ``folder`` in processes whose command line contains ``command``; see ``faults.c``.

    ``first`` is the number of the first call that fails, from 1 on; with 0 none does.
    """

    folder: Path
    command: str = ""
    calls: str = ""
    first: int = 0
    count: int = 1
    error: int = errno.EIO
    done: bool = False
    kill: bool = False
    exact: bool = False
    log: Path | None = None
    record: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a program gets to meet them."""
        settings = {
            "folder": self.folder.resolve(), "command": self.command, "calls": self.calls, "first": self.first,
            "count": self.count, "errno": self.error, "done": int(self.done), "kill": int(self.kill), "log": self.log,
            "record": self.record,
            "exact": int(self.exact),
        }  # fmt: skip
        lines = [f"{name}={value}" for name, value in settings.items() if value not in (None, "")]
        return {"LD_PRELOAD": str(library()), "FAULTS": "\n".join(lines)}

    def at(self, number: int) -> Faults:
        """The same with the call ``number`` as the first that fails."""
        return replace(self, first=number)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was counted."""

    process: int
    number: int
    name: str
    path: Path


def calls(log: Path) -> list[Call]:
    """The calls in a log of ``faults.c``, in their order."""
    lines = [line.split(" ", 3) for line in log.read_text().splitlines()]
    return [Call(int(process), int(number), name, Path(path)) for process, number, name, path in lines]


# What a power loss leaves of a folder: the calls that ``faults.c`` has recorded, less some that were not synced.
#
# The model is that of ALICE (Pillai et al., OSDI 2014), for file systems that order only the changes of one folder.
# A synced folder has all its names. It may lack the last changes since then. Each write to a file since the last
# sync may be there or not. What is not there reads as zeros.


NAMES = ("create", "mkdir", "link", "rename", "unlink", "rmdir")
DATA = ("write", "truncate", "extend")


@dataclass(frozen=True, slots=True)
class Change:
    """A recorded call. ``number`` is the offset of a write, the length of a truncation; ``file`` outlives its names."""

    call: str
    file: int
    number: int
    path: Path
    other: Path
    data: bytes

    @property
    def folder(self) -> Path:
        """The folder whose names it changes."""
        return (self.other if self.call in ("link", "rename") else self.path).parent


@dataclass(slots=True)
class _Seen:
    """The names as the programs saw them, to follow files through their renames. Numbers of inodes are used again."""

    names: dict[Path, int] = field(default_factory=dict)
    files: dict[int, int] = field(default_factory=dict)
    made: int = 0

    def file(self, call: str, inode: int, path: Path, other: Path) -> int:
        """The file that a call is about, by a number of its own."""
        if call in ("create", "mkdir"):
            self.made += 1
            self.files[inode] = self.names[path] = self.made
            return self.made
        if call == "rename":
            self.names[other] = self.names.pop(path)
            return self.names[other]
        if call == "link":
            self.names[other] = self.names[path]
            return self.names[other]
        if call in ("unlink", "rmdir"):
            return self.names.pop(path)
        return self.files.get(inode, 0)


def changes(record: Path) -> list[Change]:
    """The calls in a record of ``faults.c``, in their order. A folder that existed before has the file 0."""
    content, at, seen, found = record.read_bytes(), 0, _Seen(), list[Change]()
    while at < len(content):
        end = content.index(b"\n", at)
        call, inode, number, length, rest = content[at:end].decode().split(" ", 4)
        path, other = (Path(text) for text in rest.split("\t"))
        at = end + 1 + int(length)
        file = seen.file(call, int(inode), path, other)
        found.append(Change(call, file, int(number), path, other, content[end + 1 : at]))
    return found


def after(done: Sequence[Change], rng: random.Random | None, *, names: bool) -> tuple[dict[Path, bytes], set[Path]]:
    """Files and folders that are left if power fails after ``done``.

    ``rng`` chooses from what was not synced. Without it no such data is left, and such names only if ``names``.
    """
    synced_names: dict[Path, int] = {}
    synced_data: dict[int, int] = {}
    for at, change in enumerate(done):
        if change.call == "sync":
            synced_names[change.path] = synced_data[change.file] = at
    beginnings = {
        folder: rng.randint(synced_names.get(folder, 0), len(done)) if rng else len(done) if names else -1
        for folder in {change.folder for change in done if change.call in NAMES}
    }
    found: dict[Path, int] = {}
    folders: set[Path] = set()
    contents: dict[int, bytearray] = {}
    for at, change in enumerate(done):
        if change.call in NAMES:
            contents.setdefault(change.file, bytearray())
            if at <= max(synced_names.get(change.folder, -1), beginnings[change.folder]):
                _rename(change, found, folders)
        elif change.call in DATA and (at <= synced_data.get(change.file, -1) or (rng and rng.random() < 0.5)):
            _write(change, contents.setdefault(change.file, bytearray()))
    whole = {path for path in folders if all(above in folders for above in path.parents if _inside(above, done))}
    return {
        path: bytes(contents[file])
        for path, file in found.items()
        if path not in folders and (path.parent in whole or not _inside(path.parent, done))
    }, whole


def _inside(path: Path, done: Sequence[Change]) -> bool:
    """Whether the programs have made the folder ``path``."""
    return any(change.call == "mkdir" and change.path == path for change in done)


def _rename(change: Change, found: dict[Path, int], folders: set[Path]) -> None:
    if change.call == "mkdir":
        folders.add(change.path)
    if change.call in ("create", "mkdir"):
        found[change.path] = change.file
        return
    if change.call in ("rename", "link"):
        found[change.other] = change.file
    if change.call != "link":
        found.pop(change.path, None)
        folders.discard(change.path)


def _write(change: Change, content: bytearray) -> None:
    if change.call == "truncate":
        del content[change.number :]
    end = change.number + len(change.data)
    content.extend(bytes(max(0, end - len(content))))
    content[change.number : end] = change.data


def losses(done: Sequence[Change], seed: int, times: int) -> Iterator[tuple[Mapping[Path, bytes], set[Path]]]:
    """What different losses of power leave after ``done``: nothing unsynced, all names without data, and a choice."""
    yield after(done, None, names=False)
    yield after(done, None, names=True)
    for number in range(times):
        yield after(done, random.Random(1000 * seed + number), names=False)


def rebuild(left: tuple[Mapping[Path, bytes], set[Path]], old: Path, new: Path) -> None:
    """Make in ``new`` what is left of ``old``."""
    files, folders = left
    new.mkdir(parents=True)
    for folder in sorted(folders):
        (new / folder.relative_to(old)).mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        (new / path.relative_to(old)).write_bytes(content)
