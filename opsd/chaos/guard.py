"""The guard of a fault, which undoes it after its time, when told to, or as soon as ``opsd chaos`` is gone.

``opsd chaos`` holds the other end of the guard's standard input and undoes nothing itself while the guard is alive.
Normal end, Ctrl-C and kill -9 are therefore handled alike. Lines from ``opsd chaos``: the record, then ``begun``; lines
from the guard: ``ready`` or a problem, then the result. A guard that was itself killed leaves its record behind, which
``opsd chaos undo`` finds.

The faults in effect on this node: a small file per fault in shared memory, written by the fault's guard.

Each user has their own folder beside the runs' folder. Root sees all of them and undoes only its own, because root
must not execute what another user has written.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import stat
import subprocess
import sys
import syslog
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from opsd import exitcodes
from opsd.chaos.faults import InjectedFault
from opsd.chaos.undo import ChaosError, Process, Undo, decode, encode

_UNDO_S: Final = 30.0
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """One fault: what it is, how long it lasts once it has begun, and how it is undone.

    ``began`` is in seconds since the epoch, None while the fault is being caused.
    """

    id: str
    fault: str
    text: str
    run: str
    for_s: float
    undo: dict[str, Any]
    began: float | None = None
    guard_pid: int = 0
    guard_start: int = 0

    @property
    def guard(self) -> Process:
        """The process that undoes it."""
        return Process(self.guard_pid, self.guard_start)

    @property
    def state(self) -> str:
        """Its state as ``opsd chaos list`` shows it."""
        if not self.guard.alive:
            return "left over: its guard is gone; opsd chaos undo ends it"
        if self.began is None:
            return "being caused"
        return f"in effect, {max(0.0, self.began + self.for_s - time.time()):.0f} s left"


def folder_of(root: Path, uid: int) -> Path:
    """Where the records of the user ``uid`` are, beside the runs' folder ``root``."""
    return root.absolute().with_name(f"{root.name}-chaos-{uid}")


def write(folder: Path, record: FaultRecord) -> None:
    """Write ``record``. Raises ChaosError if the folder belongs to another user, OSError if it cannot be written."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _owned(folder, os.getuid()):
        raise ChaosError(f"{folder} belongs to another user: remove it")
    draft = folder / f".{record.id}"
    draft.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
    draft.replace(folder / f"{record.id}.json")


def remove(folder: Path, record: FaultRecord) -> None:
    """Remove ``record``, and the folder with the last one."""
    with suppress(OSError):
        (folder / f"{record.id}.json").unlink(missing_ok=True)
        folder.rmdir()


def find(root: Path) -> Iterator[tuple[int, FaultRecord]]:
    """The user and the record of every fault that this user may see. Other files are skipped."""
    for folder in sorted(root.absolute().parent.glob(f"{root.name}-chaos-*")):
        uid = int(number) if (number := folder.name.rpartition("-")[2]).isdigit() else -1
        if not _owned(folder, uid):
            continue
        with suppress(PermissionError):
            for file in sorted(folder.glob("*.json")):
                with suppress(OSError, ValueError, TypeError):
                    yield uid, FaultRecord(**json.loads(_read(file)))


def end(folder: Path, record: FaultRecord) -> str:
    """Tell the guard to undo the fault of ``record``, or undo it here if the guard is gone; returns what was done.

    Raises ChaosError and OSError.
    """
    if record.guard.signal(signal.SIGTERM):
        deadline = time.monotonic() + _UNDO_S
        while record.guard.alive:
            if time.monotonic() > deadline:
                raise ChaosError(f"the guard of {record.id}, process {record.guard_pid}, does not end")
            time.sleep(0.01)
        if (folder / f"{record.id}.json").exists():
            raise ChaosError(f"the guard of {record.id} could not undo it: try again")
        return "undone by its guard"
    said = decode(record.undo).undo()
    remove(folder, record)
    return said


def _owned(folder: Path, uid: int) -> bool:
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == uid


def _read(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(descriptor, _MAX_BYTES).decode()
    finally:
        os.close(descriptor)


_END_S: Final = 30.0
_ENDINGS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Result:
    """How a fault ended: whether it is ``undone``, and a sentence about it."""

    undone: bool
    text: str


class Guard:
    """A running guard. Call ``close`` at the end; if this process dies the guard undoes the fault anyway.

    ``held`` are descriptors that the guard keeps open until the end. Raises ChaosError if it cannot guard.
    """

    def __init__(self, record: FaultRecord, undo: Undo, folder: Path, held: Sequence[int] = ()) -> None:
        self._undo = undo
        self._late = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "opsd.chaos.guard", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=held,
            cwd="/",
            text=True,
        )
        self._tell(json.dumps(asdict(record)))
        answer = self._hear()
        if answer != "ready":
            self._process.kill()
            self._process.communicate()
            raise ChaosError(f"nothing was done, because it could not be undone: {answer or 'the guard has ended'}")

    def begun(self) -> None:
        """Tell the guard that the fault is in effect: its time starts now. If the guard is gone, ``wait`` undoes it."""
        self._late = not self._tell("begun")

    def wait(self) -> Result:
        """The result, once the fault's time is over."""
        return self._result(self._hear())

    def close(self) -> Result:
        """Undo the fault now; returns the result."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        return self._result(self._hear())

    def _result(self, answer: str) -> Result:
        if answer and not self._late:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            return Result(**json.loads(answer))
        self._process.wait(_END_S)
        gone = "the guard was told to end" if answer else "the guard was killed"
        try:
            return Result(True, f"{gone}; {self._undo.undo()}")
        except (ChaosError, OSError) as error:
            return Result(False, f"{gone}, and {error}")

    def _tell(self, line: str) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def main() -> int:
    """Guard the fault whose record comes on standard input; records are kept in the folder ``sys.argv[1]``."""
    waker, signalled = _wake_on_signals()
    folder = Path(sys.argv[1])
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as unbuffered:
        line = unbuffered.readline()
    if not line:
        return 1
    guard = Process.of(os.getpid())
    assert guard is not None
    record = replace(FaultRecord(**json.loads(line)), guard_pid=guard.pid, guard_start=guard.start)
    try:
        undo = decode(record.undo)
        write(folder, record)
    except (ChaosError, OSError) as error:
        _say(str(error))
        return 1
    _say("ready")
    if _wait(signalled, None):
        record = replace(record, began=time.time())
        with suppress(OSError):
            write(folder, record)
        _wait(signalled, record.for_s)
    result = _end(undo)
    if result.undone:
        remove(folder, record)
    _say(json.dumps({"undone": result.undone, "text": result.text}))
    os.close(waker)
    return 0 if result.undone else 1


def _wake_on_signals() -> tuple[int, int]:
    """A pipe that becomes readable when one of ``_ENDINGS`` arrives: its write end and its read end."""
    signalled, waker = os.pipe()
    os.set_blocking(waker, False)
    for number in _ENDINGS:
        signal.signal(number, lambda _number, _frame: None)
    signal.set_wakeup_fd(waker)
    return waker, signalled


def _wait(signalled: int, limit_s: float | None) -> bool:
    """True once ``opsd chaos`` writes a line; False at end of file, after a signal and after ``limit_s`` seconds.

    The fault itself limits how long it takes to begin. Undoing it earlier would leave a late start unguarded.
    """
    ready, _, _ = select.select([sys.stdin.fileno(), signalled], [], [], limit_s)
    return ready == [sys.stdin.fileno()] and bool(os.read(sys.stdin.fileno(), 100))


def _end(undo: Undo) -> Result:
    try:
        return Result(True, undo.undo())
    except (ChaosError, OSError) as error:
        return Result(False, str(error))


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, flush=True)


class _Stopped(Exception):
    """Ctrl-C or a signal that asks to stop."""


@dataclass(frozen=True, slots=True)
class FaultReporter:
    """Reports what happens: on the terminal as sentences or JSON lines, and always in the system log."""

    as_json: bool

    def __call__(self, event: str, fault: InjectedFault, text: str, **fields: Any) -> None:
        if self.as_json:
            line = {"t": time.time(), "event": event, "fault": fault.name, "run": fault.run, "text": text, **fields}
            print(json.dumps(line), flush=True)
        else:
            print(text, flush=True)
        syslog.openlog("opsd-chaos", syslog.LOG_PID)
        syslog.syslog(syslog.LOG_WARNING, f"{event} {fault.name}: {text}")


def perform(fault: InjectedFault, for_s: float, folder: Path, tell: FaultReporter) -> int:
    """Cause ``fault`` and return once it is undone, after ``for_s`` seconds or a signal; returns the exit code.

    Records are written to ``folder``.
    """
    try:
        if fault.undo is None:
            fault.begin()
            tell("begun", fault, f"{fault.name}: done")
            return exitcodes.OK
        return _guarded(fault, for_s, folder, tell)
    except (ChaosError, OSError) as error:
        tell("failed", fault, f"opsd chaos {fault.name}: {error}")
        return exitcodes.FAILED


def _guarded(fault: InjectedFault, for_s: float, folder: Path, tell: FaultReporter) -> int:
    assert fault.undo is not None
    id = f"{fault.name}-{secrets.token_hex(3)}"
    record = FaultRecord(id, fault.name, fault.text, fault.run, for_s, encode(fault.undo))
    guard = Guard(record, fault.undo, folder, fault.held)
    code = exitcodes.OK
    try:
        with _stopped_by_signals():
            fault.begin()
            guard.begun()
            tell("begun", fault, f"{fault.name}: in effect for {for_s:g} s", id=id, for_s=for_s, pid=os.getpid())
            result = guard.wait()
    except _Stopped:
        code, result = exitcodes.INTERRUPTED, guard.close()
    except (ChaosError, OSError) as error:
        tell("failed", fault, f"opsd chaos {fault.name}: {error}", id=id)
        code, result = exitcodes.FAILED, guard.close()
    return _reported(fault, result, code, id, tell)


def _reported(fault: InjectedFault, result: Result, code: int, id: str, tell: FaultReporter) -> int:
    if result.undone:
        tell("undone", fault, f"{fault.name}: undone, {result.text}", id=id)
        return code
    tell("not_undone", fault, f"{fault.name}: NOT UNDONE: {result.text}; try opsd chaos undo", id=id)
    return exitcodes.FAILED


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise ``_Stopped`` in the block at a signal that asks to stop; after the block such signals are ignored."""

    def stop(_number: int, _frame: object) -> None:
        raise _Stopped

    endings = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in endings:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in endings:
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
