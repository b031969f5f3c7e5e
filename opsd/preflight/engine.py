"""Runs checks, each in a process of its own with a deadline, and collects their answers in a report.

Checks that only read state run in parallel; those that measure a speed run afterwards, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import psutil
from pydantic import TypeAdapter

from opsd import __version__
from opsd.files import oom_kills
from opsd.preflight.base import (
    Check,
    Context,
    CouldNotRunError,
    NotApplicableError,
    NotMeasuredError,
    Outcome,
    Progress,
    UnfitError,
    Verdict,
)
from opsd.preflight.judge import Yardsticks, judge
from opsd.preflight.report import Report, Result

_SIDE_BY_SIDE: Final = 4
_NVIDIA_VENDOR: Final = "0x10de"
_GPU_CLASSES: Final = ("0x0300", "0x0302")
_SIMULATED: Final = "OPSD_SIMULATED_NVML"
NO_RUN: Final = "no run was named; --train CONFIG checks one"
NO_SCRIPT: Final = "no post-training script was named; --run SCRIPT checks one"


class SelectionError(Exception):
    """The checks cannot be selected; the message is one sentence for the user."""


class Listener(Protocol):
    """Receives the progress of the checks."""

    def started(self, check: Check) -> None: ...

    def progress(self, check: Check, share: float, subject: str) -> None: ...

    def finished(self, result: Result) -> None: ...


@dataclass(frozen=True, slots=True)
class CheckRun:
    """The parameters of one run of the engine. ``context.seconds`` is set for each check.

    A check may take ``patience`` times its measuring time plus ``grace_s`` before it is killed. ``yardsticks`` gives
    what to compare a check with.
    """

    checks: Sequence[Check]
    context: Context
    logs: Path
    optional: frozenset[str] = frozenset()
    python: str = sys.executable
    """The interpreter for checks that need torch."""
    yardsticks: Callable[[Check], Yardsticks] = lambda _: Yardsticks()
    grace_s: float = 60.0
    patience: float = 3.0
    seconds: Mapping[str, float] | None = None
    """Measuring time of single checks, by name, if it differs from the profile's."""


def select(
    checks: Sequence[Check], profile: str, only: Iterable[str] = (), skip: Iterable[str] = ()
) -> tuple[Check, ...]:
    """The checks of a profile, or exactly those named in ``only``, without those in ``skip``. Raises SelectionError."""
    skipped = {find(checks, name).name for name in skip}
    chosen = [find(checks, name) for name in dict.fromkeys(only)]
    chosen = chosen or [check for check in checks if profile in check.seconds]
    selected = tuple(check for check in chosen if check.name not in skipped)
    if not selected:
        raise SelectionError("no check is left to run; drop --skip or name some with --only")
    return selected


def find(checks: Sequence[Check], name: str) -> Check:
    """The check called ``name``. Raises SelectionError with the nearest name there is."""
    known = {check.name: check for check in checks}
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]}?" if nearest else "`opsd preflight list` shows them"
        raise SelectionError(f"there is no check {name}; {hint}")
    return known[name]


async def run(check_run: CheckRun, listener: Listener) -> Report:
    """Run all checks. When cancelled, every child is ended and the report is marked as interrupted."""
    started = time.time()
    results: dict[str, Result] = {}
    gate = asyncio.Semaphore(_SIDE_BY_SIDE)

    async def one(check: Check) -> None:
        async with gate:
            listener.started(check)
            result = results[check.name] = await _run_check(check_run, check, listener)
            listener.finished(result)

    interrupted = False
    try:
        async with asyncio.TaskGroup() as group:
            for check in check_run.checks:
                if "exclusive" not in check.needs:
                    group.create_task(one(check))
        for check in check_run.checks:
            if "exclusive" in check.needs:
                await one(check)
    except asyncio.CancelledError:
        interrupted = True
    ordered = tuple(results.get(check.name) or _unfinished(check_run, check) for check in check_run.checks)
    return Report(
        check_run.context.node, check_run.context.profile, __version__, started, time.time(), ordered, interrupted
    )


async def _run_check(check_run: CheckRun, check: Check, listener: Listener) -> Result:
    seconds = (check_run.seconds or {}).get(
        check.name, check.seconds.get(check_run.context.profile, max(check.seconds.values()))
    )
    log = check_run.logs / f"{check.name}.log"
    started, clock = time.time(), time.monotonic()
    try:
        if why := unmet_need(check, check_run.context, root=os.geteuid() == 0):
            raise why
        outcome = await supervise(
            check,
            replace(check_run.context, seconds=seconds),
            deadline_s=seconds * check_run.patience + check_run.grace_s,
            log=log,
            progress=lambda share, subject: listener.progress(check, share, subject),
            python=check_run.python if "torch" in check.needs else sys.executable,
        )
        took = time.monotonic() - clock
        result = judge(check, outcome, started, check_run.yardsticks(check))
    except NotMeasuredError as error:
        took = time.monotonic() - clock
        result = Result(
            check.name, check.title, error.verdict, reason=str(error), started=started, runbook=check.runbook
        )
    return replace(
        result,
        optional=check.name in check_run.optional,
        seconds=took,
        log=str(log) if log.exists() and log.stat().st_size else "",
    )


def _unfinished(check_run: CheckRun, check: Check) -> Result:
    return Result(
        check.name,
        check.title,
        Verdict.COULD_NOT_RUN,
        check.name in check_run.optional,
        "interrupted before it was done",
    )


def unmet_need(check: Check, context: Context, *, root: bool) -> NotMeasuredError | None:
    """Why ``check`` cannot be started here, None if it can. ``root``: this process has root's rights."""
    if "root" in check.needs and not root:
        return CouldNotRunError("it needs root; run it with sudo or from the prolog")
    if "run" in check.needs and not context.train:
        return NotApplicableError(NO_RUN)
    if "script" in check.needs and not context.script:
        return NotApplicableError(NO_SCRIPT)
    if "gpu" in check.needs and context.device == "cuda":
        return _unfit_gpus(check, context)
    return None


def _unfit_gpus(check: Check, context: Context) -> NotMeasuredError | None:
    """GPUs on the PCI bus suffice, whether the driver sees them or not; simulated ones can be queried but not used."""
    if os.environ.get(_SIMULATED):
        computes = "torch" in check.needs
        return NotApplicableError("simulated GPUs cannot compute") if computes else None
    if count_gpus(context):
        return None
    if context.settings.gpus:
        reason = f"the node must have {context.settings.gpus} GPUs and there is no NVIDIA GPU on its PCI bus"
        return UnfitError(reason)
    return NotApplicableError("no NVIDIA GPU on this node")


def count_gpus(context: Context) -> int:
    """NVIDIA GPUs on the PCI bus."""
    devices = Path(context.sys, "bus/pci/devices")
    return sum(map(_is_gpu, devices.iterdir())) if devices.is_dir() else 0


def _is_gpu(device: Path) -> bool:
    try:
        vendor = (device / "vendor").read_text(encoding="ascii").strip()
        return vendor == _NVIDIA_VENDOR and (device / "class").read_text(encoding="ascii").startswith(_GPU_CLASSES)
    except OSError:
        return False


_LINE_LIMIT: Final = 1 << 24
_LOG_TAIL: Final = 2_000
_FINISH_S: Final = 5.0
_TIDY_S: Final = 2.0
_ERRORS: Final = {error.verdict: error for error in (NotApplicableError, CouldNotRunError, UnfitError)}


async def supervise(
    check: Check, context: Context, *, deadline_s: float, log: Path, progress: Progress, python: str
) -> Outcome:
    """Run ``check`` with the interpreter ``python``; what it prints goes to ``log``. Raises NotMeasuredError.

    Its process has its own session, so cancelling this call ends it and everything it started. It imports nothing from
    the current folder (-P), which may be a user's while this is root.
    """
    assert check.run is not None
    ooms = oom_kills(context.proc)
    with open(log, "wb") as output:
        process = await asyncio.create_subprocess_exec(
            python, "-P", "-m", "opsd.preflight.worker", f"{check.run.__module__}:{check.run.__qualname__}",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=output,
            start_new_session=True, limit=_LINE_LIMIT,
        )  # fmt: skip
    try:
        async with asyncio.timeout(deadline_s):
            outcome = await _converse(process, context, progress)
            if outcome is not None:
                return outcome
            exit_code = await process.wait()
    except TimeoutError:
        raise CouldNotRunError(f"it did not finish within {deadline_s:.0f} s{_last_line(log)}") from None
    finally:
        await _end(process)
    raise CouldNotRunError(_death(exit_code, oom_kills(context.proc) > ooms, log))


async def _converse(process: asyncio.subprocess.Process, context: Context, progress: Progress) -> Outcome | None:
    """Send the context and read until the outcome; None if the process ended without. Raises NotMeasuredError."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(TypeAdapter(Context).dump_json(context))
        await process.stdin.drain()
    process.stdin.close()
    async for line in process.stdout:
        message: dict[str, Any] = json.loads(line)
        if "progress" in message:
            progress(*message["progress"])
        elif "outcome" in message:
            return TypeAdapter(Outcome).validate_python(message["outcome"])
        else:
            raise _ERRORS[message["verdict"]](message["reason"])
    return None


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the process to end, so that it removes its temporary files; then kill every process of its session."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            os.kill(process.pid, signal.SIGTERM)  # process.terminate() would reap it behind asyncio's back
            async with asyncio.timeout(_TIDY_S):
                await process.wait()
    leftovers = [*_session(process.pid)]
    for kill in (lambda: os.killpg(process.pid, signal.SIGKILL), *(leftover.kill for leftover in leftovers)):
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            kill()
    with contextlib.suppress(TimeoutError):  # one in uninterruptible sleep cannot be waited for
        async with asyncio.timeout(_FINISH_S):
            await process.wait()


def _session(leader: int) -> Iterator[psutil.Process]:
    """The processes of the session that ``leader`` started, in any process group."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.pid != leader and os.getsid(process.pid) == leader:
                yield process


def _death(exit_code: int, out_of_memory: bool, log: Path) -> str:
    if exit_code >= 0:
        return f"it ended with exit code {exit_code} and no result{_last_line(log)}"
    name = signal.Signals(-exit_code).name
    if exit_code == -signal.SIGKILL and out_of_memory:
        return "the kernel's out-of-memory killer ended it; free memory on the node or lower the load of other jobs"
    return f"it was killed by {name}{_last_line(log)}"


def _last_line(log: Path) -> str:
    """The check's last line on stderr, as the end of a sentence."""
    with open(log, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _LOG_TAIL))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""
