"""Cause one fault under a guard: announce, confirm, begin, end, and report each step."""

from __future__ import annotations

import json
import os
import secrets
import signal
import syslog
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsd import exitcodes
from opsd.chaos.faults import Fault
from opsd.chaos.guard import Guard, Result
from opsd.chaos.records import FaultRecord
from opsd.chaos.undo import ChaosError, encode


class _Stopped(Exception):
    """Ctrl-C or a signal that asks to stop."""


@dataclass(frozen=True, slots=True)
class FaultReporter:
    """Reports what happens: on the terminal as sentences or JSON lines, and always in the system log."""

    as_json: bool

    def __call__(self, event: str, fault: Fault, text: str, **fields: Any) -> None:
        """One event of ``fault``."""
        if self.as_json:
            line = {"t": time.time(), "event": event, "fault": fault.name, "run": fault.run, "text": text, **fields}
            print(json.dumps(line), flush=True)
        else:
            print(text, flush=True)
        syslog.openlog("opsd-chaos", syslog.LOG_PID)
        syslog.syslog(syslog.LOG_WARNING, f"{event} {fault.name}: {text}")


def perform(fault: Fault, for_s: float, folder: Path, tell: FaultReporter) -> int:
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


def _guarded(fault: Fault, for_s: float, folder: Path, tell: FaultReporter) -> int:
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


def _reported(fault: Fault, result: Result, code: int, id: str, tell: FaultReporter) -> int:
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
