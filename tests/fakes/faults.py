"""Programs whose file system fails: the environment that preloads ``faults.c``, and the log of calls that it writes."""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
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
