"""Ends what a launcher has started and left running, once it is gone without ending it: killed, for instance.

Ranks die with their launcher (``PR_SET_PDEATHSIG``). Their children do not inherit that. Workers of data loaders,
daemons, companions and the program below a shell script would live on beside the next start of the run. They are known
by the launcher's mark in their environment, or else by the session of their rank or companion. A process that is
meant to outlive its launcher starts in a session of its own without ``OPSD_LAUNCHER``.

``python -I -S leftovers.py MARK FOLDER`` is the guard of a launcher (``guard.py``), a process that waits for its end.
It uses the standard library only, and little of it, because one runs beside every launcher. Its stdin is a socket that
keeps messages apart. ``leaders PID:START …`` names the ranks and companions that there are now, which lead sessions.
``done`` says that none is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping

LAUNCHER = "OPSD_LAUNCHER"
"""The environment variable that marks everything a launcher has started."""
RUN_DIR, JOB, NODE, SLURM_JOB = "OPSD_RUN_DIR", "OPSD_JOB", "OPSD_NODE", "SLURM_JOB_ID"
DONE = "done"
KILLING_S = 30.0
_AGAIN_S = 0.02
_STATE, _SESSION, _START = 0, 3, 19
Environment = Mapping[bytes, bytes]
IsOurs = Callable[[int, Environment], bool]


def of_launcher(mark: str, folder: str) -> IsOurs:
    """Processes of the run in ``folder`` with the mark of one launcher."""
    wanted = {LAUNCHER.encode(): mark.encode(), RUN_DIR.encode(): os.fsencode(folder)}
    return lambda _, environment: wanted.items() <= environment.items() and _is_of_its_job(environment)


def of_gone_launchers(folder: str, node: str) -> IsOurs:
    """Processes of the run in ``folder`` with the mark of any launcher of this ``node`` that is gone.

    A mark from another namespace of processes, or from another node by ``srun``, says nothing here about its launcher.
    """
    here = _namespace("self")

    def is_ours(pid: int, environment: Environment) -> bool:
        if environment.get(RUN_DIR.encode()) != os.fsencode(folder) or not _is_of_its_job(environment):
            return False
        if environment.get(NODE.encode()) != node.encode() or _namespace(str(pid)) != here:
            return False
        launcher, _, start = environment.get(LAUNCHER.encode(), b"").decode("ascii", "replace").partition("-")
        return launcher.isdecimal() and start.isdecimal() and start_of(int(launcher)) != int(start)

    return is_ours


def _is_of_its_job(environment: Environment) -> bool:
    """False for a Slurm job that a rank has submitted: sbatch hands on the environment."""
    return environment.get(JOB.encode(), b"") == environment.get(SLURM_JOB.encode(), b"")


def end(is_ours: IsOurs, leaders: Mapping[int, int] | None = None, limit_s: float = KILLING_S) -> int:
    """Kill all processes that ``is_ours`` accepts, or in the sessions of ``leaders``; returns how many were found.

    ``leaders`` maps pids to start times, which tell a session from a later one of the same number. Looks until two
    looks in a row find nothing, since processes start others meanwhile, for ``limit_s`` seconds at most.
    """
    seen: set[tuple[int, int]] = set()
    deadline, quiet = time.monotonic() + limit_s, 0
    while quiet < 2 and time.monotonic() < deadline:
        found = _find(is_ours, leaders or {})
        for pid, _ in found:
            _kill(pid)
        seen.update(found)
        quiet = 0 if found else quiet + 1
        _pause()
    return len(seen)


def start_of(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None if there is none (proc(5))."""
    fields = _stat(pid)
    return int(fields[_START]) if fields else None


def _find(is_ours: IsOurs, leaders: Mapping[int, int]) -> list[tuple[int, int]]:
    # The number of a session is not reused while it has processes; only a later leader can have made it another's.
    sessions = {pid for pid, start in leaders.items() if start_of(pid) in (None, start)}
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208  # pathlib would cost every guard a megabyte
        fields = _stat(int(name)) if name.isdecimal() and int(name) != os.getpid() else None
        if not fields or fields[_STATE] in "ZX":
            continue
        if int(fields[_SESSION]) in sessions or is_ours(int(name), _environment(name)):
            found.append((int(name), int(fields[_START])))
    return found


def _stat(pid: int) -> list[str] | None:
    """State, parent, process group, session …: what follows the name in /proc/PID/stat."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _environment(pid: str) -> Environment:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = (entry.partition(b"=") for entry in file.read().split(b"\0"))
            return {name: value for name, _, value in entries}
    except OSError:
        return {}


def _namespace(pid: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115
    except OSError:
        return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Wait for the end of the launcher, which started this process, and end what is left then."""
    mark, folder = sys.argv[1:]
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are sent to whole jobs
    said = _last_message(int(mark.partition("-")[0]))
    if said == DONE:
        return
    leaders = {int(pid): int(start) for pid, _, start in (word.partition(":") for word in said.split()[1:])}
    count = end(of_launcher(mark, folder), leaders)
    if count:
        print(f"opsd: the launcher is gone; {count} processes of its run were killed", file=sys.stderr)


def _last_message(launcher: int) -> str:
    """What the launcher said last: ``DONE`` at once, all else once it has ended."""
    said = b""
    while message := os.read(0, 65_536):
        if message == DONE.encode():
            return DONE
        said = message
    while os.getppid() == launcher:  # its descriptors are closed first
        _pause()
    return said.decode()


def _pause() -> None:
    select.select((), (), (), _AGAIN_S)  # time.sleep fails where libfaketime has changed the clock


if __name__ == "__main__":
    main()
