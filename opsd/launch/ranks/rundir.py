"""The two folders of a run: the run folder, kept, and the one in shared memory, for as long as the run lives."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from opsd.client import events_path, process_start

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
KEEP_FINISHED_S = 24 * 3600
_OWN_FILES = re.compile(r"run\.json|events\.jsonl|control\.sock|\.?rank-\d{4,}\.page(\..*)?|\.run\.json\.\d+")

_STATES = re.compile(r"\.?rank-\d{4,}\.state(\..*)?")
"""Checkpoints that ranks keep in memory: they outlive a launcher, so that its successor finds them, but not the run."""


class RunError(Exception):
    """The folders of a run cannot be had; the message says why and what to do."""


class RunState(TypedDict):
    """The content of ``run.json``."""

    run: str
    job: str
    node: str
    state: str
    generation: int
    launcher_pid: int
    launcher_start: int
    world_size: int
    control: str
    folder: str
    logs: str


@dataclass(frozen=True, slots=True)
class RunFolders:
    """Where the files of a run are: ``folder`` is kept, ``memory`` lies in shared memory."""

    folder: Path
    memory: Path
    logs: Path

    @classmethod
    def create(cls, run: str, *, folder: Path | None, logs: Path | None, shared: Path) -> RunFolders:
        """Make the folders of ``run``, in memory below ``shared``.

        ``logs`` is a folder for the logs of many runs. Raises RunError if another launcher has the run or a folder
        cannot be made.
        """
        folder = (folder or default_root() / run).absolute()
        memory = shared / run
        folders = cls(folder, memory, (logs / run if logs else folder / "logs").absolute())
        try:
            _make_shared_root(memory.parent)
            _claim(memory)
            for path in (folder, folders.logs, folders.stacks):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"the run's folder {error.filename} cannot be made: {error.strerror}") from error
        return folders

    @property
    def stacks(self) -> Path:
        """Where the stacks taken at hangs go."""
        return self.folder / "stacks"

    @property
    def control(self) -> Path:
        """The launcher's control socket."""
        return self.memory / "control.sock"

    def page(self, rank: int) -> Path:
        """The rank page of ``rank``."""
        return self.memory / f"rank-{rank:04d}.page"

    def generation_logs(self, generation: int) -> Path:
        """The folder for the logs of one generation, made if needed. Raises OSError."""
        path = self.logs / f"gen-{generation:04d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def last_generation(self) -> int:
        """The highest generation that an earlier launcher of this run has started, 0 if none."""
        numbers = [int(path.name[4:]) for path in self.logs.glob("gen-*") if path.name[4:].isdigit()]
        return max(numbers, default=0)

    def forget_pages(self) -> None:
        """Remove the rank pages of the generation before, so that none is taken for a new rank's."""
        for path in self.memory.glob("rank-*.page"):
            path.unlink(missing_ok=True)

    def write_state(self, state: RunState) -> None:
        """Replace ``run.json``. A full shared memory is not the run's problem: the old file then stays."""
        draft = self.memory / f".run.json.{os.getpid()}"
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(state) + "\n", encoding="utf-8")
            draft.replace(self.memory / "run.json")


def default_root(env: Mapping[str, str] = os.environ) -> Path:
    """Where run folders go unless ``--run-dir`` says otherwise (XDG base directory specification)."""
    return Path(env.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "opsd/runs"


def memory_root(env: Mapping[str, str] = os.environ) -> Path:
    """The folder in shared memory with one folder per run; ``OPSD_SHM`` moves it."""
    return Path(env.get("OPSD_SHM") or "/dev/shm/opsd")  # noqa: S108  # made sticky, its folders are checked for owner


def prune(root: Path, now: float, keep_s: float = KEEP_FINISHED_S) -> None:
    """Remove what finished runs of this user left in shared memory ``keep_s`` seconds ago or earlier.

    Only files that the launcher and the rank page make are removed, and a folder only once it is empty.
    """
    with contextlib.suppress(OSError):
        for memory in list(root.iterdir()):
            with contextlib.suppress(OSError):
                info = memory.lstat()
                stale = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and info.st_mtime < now - keep_s
                if stale and owner_pid(memory) is None:
                    _clear(memory, _STATES)
                    _clear(memory)
                    memory.rmdir()


def owner_pid(memory: Path) -> int | None:
    """The pid of the living launcher that ``memory`` belongs to, None if it has none."""
    try:
        state = json.loads((memory / "run.json").read_text(encoding="utf-8"))
        pid, start = int(state["launcher_pid"]), int(state["launcher_start"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if pid != os.getpid() and process_start(pid) == start else None


def _make_shared_root(root: Path) -> None:
    """Shared by all users of the node like /tmp, so sticky: nobody can take away another user's run."""
    with contextlib.suppress(FileExistsError):
        root.mkdir(parents=True)
        root.chmod(0o1777)
    if os.getuid() == 0 and root.stat().st_uid != 0:
        raise RunError(
            f"{root} belongs to another user, who could redirect what root writes; remove it, or set OPSD_SHM"
        )


def _claim(memory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        memory.mkdir(mode=0o755)
    info = memory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise RunError(f"{memory} belongs to another user; give this run another name with --run-id")
    pid = owner_pid(memory)
    if pid is not None:
        raise RunError(f"run {memory.name} is being run by process {pid}; give this one another name with --run-id")
    _clear(memory)


def _clear(memory: Path, names: re.Pattern[str] = _OWN_FILES) -> None:
    for path in list(memory.iterdir()):
        if names.fullmatch(path.name):
            path.unlink(missing_ok=True)


def new_run_name(env: Mapping[str, str] = os.environ) -> str:
    """A name for a run that was given none: the Slurm job's, otherwise the time and this process."""
    job = env.get("SLURM_JOB_ID", "")
    return f"job-{job}" if job else time.strftime("run-%Y%m%d-%H%M%S") + f"-{os.getpid()}"


def rank_events(page: Path) -> Path:
    """The file with the rare events that a rank writes beside its page."""
    return events_path(page)
