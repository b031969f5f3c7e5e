"""The runs of this node as targets of faults, found in shared memory."""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from opsd.chaos.undo import ChaosError, Process
from opsd.launch.ranks.process import descendants
from opsd.rank_page import PageError, RankPage, process_state, read_page
from opsd.rundir import owner_pid


@dataclass(frozen=True, slots=True)
class Run:
    """A run with a live launcher on this node. ``uid`` is its user."""

    name: str
    node: str
    memory: Path
    folder: Path
    uid: int
    launcher: Process

    @property
    def text(self) -> str:
        """The run for people."""
        return f"run {self.name} on node {self.node}"


def runs(root: Path) -> list[Run]:
    """The live runs whose folders are in ``root``, by name. Invalid folders are skipped."""
    found = []
    for memory in sorted(root.iterdir()) if root.is_dir() else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            if (run := _living(memory)) is not None:
                found.append(run)
    return found


def _living(memory: Path) -> Run | None:
    pid = owner_pid(memory)
    launcher = None if pid is None else Process.of(pid)
    uid = memory.lstat().st_uid
    if launcher is None or memory.is_symlink() or _uid(launcher.pid) != uid:
        return None
    state = json.loads((memory / "run.json").read_text(encoding="utf-8"))
    return Run(memory.name, str(state["node"]), memory, Path(state["folder"]), uid, launcher)


def find(root: Path, name: str | None) -> Run:
    """The run named ``name``, or the only one. Raises ChaosError."""
    living = runs(root)
    names = ", ".join(run.name for run in living)
    if not living:
        raise ChaosError(f"no run of opsd launch is active on this node (looked in {root})")
    if name is None and len(living) > 1:
        raise ChaosError(f"several runs are active on this node: name one of {names} with --run")
    for run in living:
        if name in (None, run.name):
            return run
    raise ChaosError(f"no run {name} is active on this node; there is {names}")


def ranks(run: Run) -> list[RankPage]:
    """The pages of the run's live ranks on this node: only processes that descend from its launcher."""
    below = set(descendants(run.launcher.pid))
    found = []
    for path in sorted(run.memory.glob("rank-*.page")):
        try:
            page = read_page(path)
        except PageError:
            continue
        if page.pid in below and process_state(page) not in (None, "Z"):
            found.append(page)
    return found


def rank(run: Run, number: int | None) -> RankPage:
    """The page of rank ``number``, or of the lowest on this node. Raises ChaosError."""
    pages = ranks(run)
    if not pages:
        raise ChaosError(f"{run.text} has no live rank at the moment: try again once it has started")
    for page in pages:
        if number in (None, page.rank):
            return page
    there = ", ".join(str(page.rank) for page in pages)
    raise ChaosError(f"rank {number} of {run.text} is not here; the ranks on this node are {there}")


def everything(run: Run) -> Iterator[Process]:
    """The launcher, its descendants, and those of its ranks that have been reparented."""
    yield run.launcher
    known = {run.launcher.pid, os.getpid()}
    for pid in descendants(run.launcher.pid):
        if (process := Process.of(pid)) is not None:
            known.add(pid)
            yield process
    for other in psutil.process_iter():
        strange = other.pid in known or _uid(other.pid) != run.uid or not _of_a_rank(other, run)
        if not strange and (process := Process.of(other.pid)) is not None:
            yield process


def become_owner(run: Run) -> None:
    """Become the run's user permanently, so that the kernel prevents harm to other users."""
    if os.geteuid() == run.uid:
        return
    if os.geteuid() != 0:
        raise ChaosError(f"{run.text} belongs to {_user(run.uid)}: become that user, or root")
    try:
        entry = pwd.getpwuid(run.uid)
    except KeyError:
        raise ChaosError(f"{run.text} belongs to user {run.uid}, which this node does not know") from None
    os.initgroups(entry.pw_name, entry.pw_gid)
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(run.uid, run.uid, run.uid)
    if not (os.access(sys.executable, os.X_OK) and os.access(__file__, os.R_OK) and os.access(os.__file__, os.R_OK)):
        raise ChaosError(
            f"{run.text} belongs to {entry.pw_name}, who has no access to this Python ({sys.executable}): "
            "install opsd where every user may read it, as deploy/install does"
        )


def _of_a_rank(process: psutil.Process, run: Run) -> bool:
    try:
        return process.environ().get("OPSD_RANK_PAGE", "").startswith(f"{run.memory}/")
    except psutil.Error:
        return False


def _uid(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).uids().real)
    except psutil.Error:
        return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
