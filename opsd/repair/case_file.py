"""The file of a repair's case, and the order that begins one.

Repairs on disk, below ``<state folder>/repair``: the order for one, the one under way, those that have ended.

They are what is left of a repair after a reboot: each attempt is durable before it begins.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import TypeAdapter

from opsd.collectors.repairs import CASE, FOLDER, ORDER, PAST, read_record
from opsd.durable import make_folder, sync_folder
from opsd.files import write_text
from opsd.repair.repair_plan import Case
from opsd.slurm.port import SlurmUnavailable

KEPT = 100
"""Ended repairs that are kept."""
WEEK_S = 7 * 86_400.0

_CASE = TypeAdapter(Case)
_REFUSED: Final = "job refused: "
"""Begins the order of a node that Slurm's prolog has found unfit; what has failed follows."""


class CaseError(Exception):
    """The repair cannot be recorded or read; the message says why and what to do. Nothing is done without a record."""


class Refusal(NamedTuple):
    """The epoch second at which Slurm's prolog refused a job, and what had failed (``Report.failures``)."""

    at: float
    failures: str


class CaseFile:
    """The repairs of this node. Methods raise CaseError unless they say otherwise."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / FOLDER
        self._current = self.folder / CASE

    def order(self, refused_for: str = "") -> None:
        """Ask for a repair of this node, which is drained, or has refused a job ``refused_for`` these failures."""
        with self._reporting():
            make_folder(self.folder, mode=0o700)
            write_text(self.folder / ORDER, f"{_REFUSED}{refused_for}\n" if refused_for else "")

    @property
    def ordered(self) -> bool:
        """Whether a repair was asked for."""
        return (self.folder / ORDER).exists()

    @property
    def refusal(self) -> Refusal | None:
        """Why a repair was asked for if that is because the node has refused a job, for which Slurm drains it."""
        with suppress(OSError), open(self.folder / ORDER, encoding="utf-8", errors="replace") as file:
            told = file.read()
            if told.startswith(_REFUSED):
                return Refusal(os.fstat(file.fileno()).st_mtime, told.removeprefix(_REFUSED).strip())
        return None

    def drop_order(self) -> None:
        """Forget that a repair was asked for."""
        with self._reporting():
            (self.folder / ORDER).unlink(missing_ok=True)

    def current(self) -> Case | None:
        """The repair under way, of whatever node."""
        try:
            return _CASE.validate_json(read_record(self._current))
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise CaseError(f"{self.folder} can be read by root only: run the command with sudo") from error
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else "it is no record of this opsd, or not root's"
            raise CaseError(f"{self._current} cannot be read ({said}); move it away to begin a new repair") from error

    def keep(self, case: Case) -> None:
        """Make ``case`` durable; one that has ended goes to the ended ones."""
        with self._reporting():
            make_folder(self.folder, mode=0o700)
            path = self._current if case.end is None else self.folder / f"{case.id}.json"
            write_text(path, _CASE.dump_json(case, indent=1).decode() + "\n")
            if case.end is not None:
                self._current.unlink(missing_ok=True)
                for old in sorted(self.folder.glob(PAST))[:-KEPT]:
                    with suppress(OSError):  # a folder of that name is nobody's repair
                        old.unlink()
                sync_folder(self.folder)

    def past(self) -> list[Case]:
        """The ended repairs, oldest first; those that cannot be read are left out. Raises nothing."""
        found = []
        for path in sorted(self.folder.glob(PAST)):
            with suppress(OSError, ValueError):
                found.append(_CASE.validate_json(read_record(path)))
        return found

    def current_of(self, node: str) -> Case | None:
        """The repair under way, which has to be one of ``node``: state folders are copied with the disks of nodes."""
        case = self.current()
        if case is not None and case.node != node:
            raise CaseError(
                f"{self._current} is a repair of {case.node}, and this is {node}: move it away if the disk is a copy"
            )
        return case

    def recent(self, node: str, now: float, since: float = 0.0) -> int:
        """How many repairs of the last week, and ``since`` then, returned ``node``."""
        ours = (case for case in self.past() if case.node == node and case.end == "returned")
        return sum(0 <= now - case.opened_at < WEEK_S and case.opened_at >= since for case in ours)

    def new_id(self, now: float) -> str:
        """A name for a repair that begins at the epoch second ``now``, after all others whatever the clock says.

        Otherwise one of a clock that was ahead would be the newest for long, and the next could take its place.
        """
        newest = max((path.stem for path in self.folder.glob(PAST)), default="")
        name = time.strftime("repair-%Y%m%dT%H%M%S", time.gmtime(now))
        if name > newest:
            return name
        stem, _, number = newest.partition("x")
        return f"{stem}x{int(number) + 1 if number.isdecimal() else 1:04}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock of this node's repair. Raises CaseError if another program does."""
        with self._reporting():
            make_folder(self.folder, mode=0o700)
            descriptor = os.open(self.folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CaseError("a repair of this node is under way; `opsd repair` without --act shows it") from error
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CaseError(
                f"{self.folder} cannot be written: {error.strerror}; without a record nothing more is done"
            ) from error


# How agent and preflight have their node repaired: by a file, for which ``opsd-repair.path`` waits.
#
# The agent has neither the rights nor the memory for a repair, and nothing to do for it between drain and return.


class Ordering:
    """Drains with ``drain``, then orders the repair if ``acting``, and says else that there could be one."""

    def __init__(self, drain: Callable[[str, str], str], state_dir: Path, *, acting: bool) -> None:
        self._drain, self._file, self._acting = drain, CaseFile(state_dir), acting

    def __call__(self, node: str, reason: str) -> str:
        """See ``opsd.agent.actions.Drainer``. A drain that waits for Slurm is ordered a repair, too."""
        try:
            done = self._drain(node, reason)
        except SlurmUnavailable:
            self._order()
            raise
        return f"{done}; {self._order()}"

    def _order(self) -> str:
        if not self._acting:
            return "`opsd repair --act` on it would repair it (policy.repair is recommend)"
        try:
            self._file.order()
        except CaseError as error:
            return f"its repair was not ordered: {error}"
        return "its repair is ordered"
