"""Runs one check in its own process: reads its answers, enforces its deadline, ends all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from pydantic import TypeAdapter

from opsd.preflight.base import Check, Context, Outcome, Progress, Verdict

_LINE_LIMIT: Final = 1 << 24
_LOG_TAIL: Final = 2_000
_FINISH_S: Final = 5.0
_TIDY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How the process of a check ended: its outcome, or NOT_APPLICABLE, COULD_NOT_RUN or FAIL with the reason."""

    outcome: Outcome | None
    verdict: Verdict = Verdict.PASS
    reason: str = ""


async def supervise(
    check: Check, context: Context, *, deadline_s: float, log: Path, progress: Progress, python: str
) -> Answer:
    """Run ``check`` with the interpreter ``python`` and return its answer; its output goes to ``log``.

    Its process has its own session, so cancelling this call ends it and everything it started. It imports nothing from
    the current folder (-P), which may be a user's while this is root.
    """
    assert check.run is not None
    ooms = _oom_kills(context.proc)
    with open(log, "wb") as output:
        process = await asyncio.create_subprocess_exec(
            python, "-P", "-m", "opsd.preflight.worker", f"{check.run.__module__}:{check.run.__qualname__}",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=output,
            start_new_session=True, limit=_LINE_LIMIT,
        )  # fmt: skip
    try:
        async with asyncio.timeout(deadline_s):
            answer = await _converse(process, context, progress)
            if answer is not None:
                return answer
            exit_code = await process.wait()
    except TimeoutError:
        return Answer(None, Verdict.COULD_NOT_RUN, f"it did not finish within {deadline_s:.0f} s{_last_line(log)}")
    finally:
        await _end(process)
    return Answer(None, Verdict.COULD_NOT_RUN, _death(exit_code, _oom_kills(context.proc) > ooms, log))


async def _converse(process: asyncio.subprocess.Process, context: Context, progress: Progress) -> Answer | None:
    """Send the context and read answers until the final one; None if the process ended without one."""
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
            return Answer(TypeAdapter(Outcome).validate_python(message["outcome"]))
        elif "not_applicable" in message:
            return Answer(None, Verdict.NOT_APPLICABLE, message["not_applicable"])
        elif "unfit" in message:
            return Answer(None, Verdict.FAIL, message["unfit"])
        else:
            return Answer(None, Verdict.COULD_NOT_RUN, message["could_not_run"])
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


def _oom_kills(proc: str) -> int:
    """Processes killed by the kernel's out-of-memory killer since boot; 0 if the kernel does not count them."""
    with contextlib.suppress(OSError):
        for line in Path(proc, "vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _last_line(log: Path) -> str:
    """The check's last line on stderr, as the end of a sentence."""
    with open(log, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _LOG_TAIL))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""
