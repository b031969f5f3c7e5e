"""The two folders of a run: the run folder, kept, and the one in shared memory, for as long as the run lives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypedDict

from opsd import exitcodes
from opsd.durable import Unproved, make_folder
from opsd.rank_page import process_runs

_EVERYBODY: Final = [b"0", b"0", b"4294967295"]


def in_user_namespace(process: Path = Path("/proc/self")) -> bool:
    """Whether this process sees other user ids than the machine has, so that 0 is not the machine's root."""
    try:
        return (process / "uid_map").read_bytes().split() != _EVERYBODY
    except OSError:  # a kernel without user namespaces
        return False


def unmapped_uid(system: Path = Path("/proc/sys/kernel")) -> int | None:
    """The id of unmapped users of the machine, root among them; None outside a user namespace."""
    return int((system / "overflowuid").read_bytes()) if in_user_namespace() else None


def machine_uid(process: Path = Path("/proc/self")) -> int:
    """This user's id outside its user namespace (user_namespaces(7)): another for each user, also where all are 0."""
    uid = os.getuid()
    try:
        lines = (process / "uid_map").read_bytes().splitlines()
    except OSError:
        return uid
    for inside, outside, count in (map(int, line.split()) for line in lines):
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid


RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
RECORDER = "flight_recorder"
"""Where the ranks' flight recorder dumps go, in the run's folder."""
STEPS = "steps.jsonl"
"""The steps of the run as its launcher sees them, in the run's folder."""
KEEP_FINISHED_S = 24 * 3600
_MAX_NAME = 63
_MAX_TWINS = 100
_OWN_FILES = re.compile(
    r"run\.json|events\.jsonl|control\.sock|\.?rank-\d{4,}\.(page|error\.json|dump)(\..*)?|\.run\.json\.\d+"
)

_STATES = re.compile(r"\.?rank-\d{4,}\.state(\..*)?")
"""Checkpoints that ranks keep in memory: they outlive a launcher, so that its successor finds them, but not the run."""


class RunError(Exception):
    """The folders of a run cannot be had; the message says why and what to do."""


State = Literal["waiting", "running", "restarting", "stopping", "spare", "finished", "failed"]


class RunState(TypedDict):
    """The content of ``run.json``."""

    run: str
    job: str
    node: str
    state: State
    generation: int
    launcher_pid: int
    launcher_start: int
    world_size: int
    control: str
    folder: str
    logs: str


@dataclass(frozen=True, slots=True)
class RunFolders:
    """The folders of a run: ``folder`` is kept, ``memory`` lies in shared memory."""

    run: str
    folder: Path
    memory: Path
    logs: Path
    hold: int
    """A descriptor whose lock says that this launcher has the run; the kernel gives it up with the process."""
    predecessor: int = 0
    """The pid of the launcher that had the run on this node before and is dead, 0 if none has left its ``run.json``."""

    @classmethod
    def create(
        cls, run: str, *, folder: Path | None, logs: Path | None, shared: Path, alone: bool = False
    ) -> RunFolders:
        """Make the folders of ``run``, in memory below ``shared``.

        ``logs`` is a folder for the logs of many runs. ``alone``: nobody else looks for the run by its name, so that it
        may have the next free one, NAME-2. Raises RunError if another launcher has the run or a folder cannot be made,
        and OSError if the disk or the quota is full.
        """
        try:
            _make_shared_root(shared)
            name, memory, hold, before = _first_free(shared, run) if alone else (run, *_claim(shared, run))
            folder = (folder or default_root() / name).absolute()
            folders = cls(name, folder, memory, (logs / name if logs else folder / "logs").absolute(), hold, before)
            with contextlib.suppress(Unproved):  # of a power loss only; the claims, which count, are proved
                make_folder(folder)
            for path in (folders.logs, folders.stacks, folder / RECORDER):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if exitcodes.is_full(error.errno):
                raise
            raise RunError(f"the run's folder {error.filename} cannot be made: {error.strerror}") from error
        return folders

    def release(self) -> None:
        """Let another launcher have the run; the end of the process does the same."""
        os.close(self.hold)

    @property
    def stacks(self) -> Path:
        """Where the stacks taken at hangs go."""
        return self.folder / "stacks"

    @property
    def control(self) -> Path:
        """The launcher's control socket."""
        return self.memory / "control.sock"

    def page(self, rank: int) -> Path:
        return self.memory / f"rank-{rank:04d}.page"

    def error_file(self, rank: int) -> Path:
        """Where ``rank`` leaves the exception that it ends with; in memory, as the disk may be full."""
        return self.memory / f"rank-{rank:04d}.error.json"

    def dump(self, rank: int) -> Path:
        """Where ``rank`` leaves its flight recorder when asked; in memory, as a file server may hang."""
        return self.memory / f"rank-{rank:04d}.dump"

    def generation_logs(self, generation: int) -> Path:
        return self.logs / f"gen-{generation:04d}"

    def last_generation(self) -> int:
        """The highest generation that an earlier launcher of this run has started, 0 if none."""
        numbers = [int(path.name[4:]) for path in self.logs.glob("gen-*") if path.name[4:].isdigit()]
        return max(numbers, default=0)

    def forget_pages(self) -> None:
        """Remove the rank pages and errors of the generation before, so that none is taken for a new rank's."""
        stale = ("rank-*.page", "rank-*.error.json", "rank-*.dump", "rank-*.torch")
        for path in (path for pattern in stale for path in self.memory.glob(pattern)):
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
                if stale and owner_pid(memory) is None and (hold := _lock(memory)) is not None:
                    _clear(memory, _STATES)
                    _clear(memory)
                    memory.rmdir()
                    os.close(hold)


def owner_pid(memory: Path) -> int | None:
    """The pid of the living launcher that ``memory`` belongs to, None if it has none."""
    pid, start = _launcher(memory)
    return pid if pid not in (0, os.getpid()) and process_runs(pid, start) else None


def _launcher(memory: Path) -> tuple[int, int]:
    """The pid and the start time of the launcher that has written ``run.json``, (0, 0) without one."""
    try:
        state = json.loads((memory / "run.json").read_text(encoding="utf-8"))
        return int(state["launcher_pid"]), int(state["launcher_start"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0


def _make_shared_root(root: Path) -> None:
    """Shared by all users of the node like /tmp, so sticky: nobody can take away another user's run.

    The first user makes it. The machine's root makes it its own before it writes below it, as its owner could redirect
    that; but not a folder that lies anywhere else than in one for all users.
    """
    with contextlib.suppress(FileExistsError):
        root.mkdir(parents=True)
        root.chmod(0o1777)
    if os.getuid() == 0 and not in_user_namespace() and root.lstat().st_uid != 0:
        above = root.parent.stat()
        if above.st_uid != 0 or not above.st_mode & stat.S_ISVTX:
            raise RunError(
                f"{root} belongs to another user, who could redirect what root writes; set OPSD_SHM to another folder"
            )
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(descriptor, 0, 0)
            os.fchmod(descriptor, 0o1777)
        finally:
            os.close(descriptor)


def _first_free(shared: Path, run: str) -> tuple[str, Path, int, int]:
    for number in range(1, _MAX_TWINS):
        name = run if number == 1 else f"{run}-{number}"
        with contextlib.suppress(RunTakenError):
            return (name, *_claim(shared, name))
    raise RunError(f"{_MAX_TWINS} runs called {run} are being run here; give this one another name with --run-id")


class RunTakenError(RunError):
    """A living launcher has the run."""


def _claim(shared: Path, run: str) -> tuple[Path, int, int]:
    """The folder of ``run`` in shared memory, its lock, and the pid of the dead launcher that had it before.

    Files of another user's run of that name stay. This user's folder then has the user's number added.
    """
    memory = shared / run
    if not _made(memory):
        memory = shared / valid_name(f"{run}.{machine_uid()}")
        if not _made(memory):
            raise RunError(f"{memory} belongs to another user; give this run another name with --run-id")
    hold, pid = _lock(memory), owner_pid(memory)
    if hold is None or pid is not None:
        if hold is not None:
            os.close(hold)
        by = "another process" if pid is None else f"process {pid}"
        raise RunTakenError(f"run {run} is being run by {by}; give this one another name with --run-id")
    before, _ = _launcher(memory)
    _clear(memory)
    return memory, hold, before


def _made(memory: Path) -> bool:
    """Make a folder, or find it there; False if somebody else has it."""
    with contextlib.suppress(FileExistsError):
        memory.mkdir(mode=0o755)
    info = memory.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def _lock(memory: Path) -> int | None:
    """A descriptor that locks the folder for as long as it is open, None if another process has the lock."""
    descriptor = os.open(memory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EWOULDBLOCK:
            raise
        return None
    return descriptor


def _clear(memory: Path, names: re.Pattern[str] = _OWN_FILES) -> None:
    for path in list(memory.iterdir()):
        if names.fullmatch(path.name):
            path.unlink(missing_ok=True)


def valid_name(text: str) -> str:
    """``text`` if it can name a run, else a name that is made from it, always the same and no other text's."""
    if RUN_NAME.fullmatch(text):
        return text
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("._-") or "run"
    mark = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=4).hexdigest()
    return f"{words[: _MAX_NAME - len(mark) - 1]}-{mark}"
