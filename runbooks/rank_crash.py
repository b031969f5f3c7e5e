"""A rank's process ended and took its generation down: who it was, why, and whether the run came back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from opsd.collectors.base import Event
from opsd.runbooks.base import Cause, Culprit, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.runs import (
    REMEMBERED_S,
    downtime,
    job_of,
    last_step_at,
    log_lines,
    quoted,
    rank_then,
    run_recovered,
    unsolved,
)
from opsd.runbooks.lib.signals import integer, text

_STORAGE = r"Errno (5|28|116|122)\b|No space left|quota exceeded|Input/output error|Stale file handle"
_COMPONENTS: tuple[tuple[str, str, str], ...] = (
    (r"uncorrectable|\bECC\b|GPU is lost|fallen off the bus|hardware stack error", "gpu", "the GPU reported a fault"),
    (r"device-side assert", "user code", "a device-side assertion"),
    (r"illegal memory access|unspecified launch failure|misaligned address|CUDA error", "rank", "a CUDA error"),
    (r"OutOfMemoryError|CUDA out of memory", "user code", "out of GPU memory"),
    (r"\bNCCL\b|\bgloo\b|DistBackendError|Connection (reset|closed|refused)", "network", "a collective failed"),
    (_STORAGE, "storage", "storage failed"),
)
"""Pattern in an error's type and message, component to blame, what it is. The first match decides. A CUDA error that
may be the program's or the hardware's is left with the rank."""

_FROM_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"}
_NATIVE = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"}


OOPS_S = 10.0
"""An oops ends its process within this time; the lines that name both lie closer still."""


def _by_oops(view: View, event: Event, pid: int | None) -> bool:
    """Whether the kernel has ended the process itself, after a fault of its own in that process."""
    oopses = [oops.at for oops in view.events("kernel_oops", REMEMBERED_S) if abs(oops.at - event.at) <= OOPS_S]
    named = [task for task in view.events("kernel_task", REMEMBERED_S) if integer(task.data, "pid") == pid]
    return pid is not None and any(abs(task.at - at) <= OOPS_S for task in named for at in oopses)


def _blamed(data: Mapping[str, object]) -> tuple[str, str, float]:
    """Component, what happened, and confidence, from the exit and the error or log that the rank left behind."""
    error, exit_status = data.get("error"), text(data, "exit")
    signal = exit_status.removeprefix("signal ")
    if not isinstance(error, Mapping) and signal in _FROM_OUTSIDE:
        return "rank", f"{signal} from outside: the kernel out of memory, a person or Slurm", 0.95
    said = f"{text(error, 'type')}: {text(error, 'message')}" if isinstance(error, Mapping) else text(data, "log_tail")
    for pattern, component, meaning in _COMPONENTS:
        if re.search(pattern, said, re.IGNORECASE):
            return component, meaning, 0.7
    if isinstance(error, Mapping):
        return "user code", f"{text(error, 'type')} raised by the program", 0.9
    return "rank", "native code crashed" if signal in _NATIVE else exit_status, 0.8


def _finding(event: Event, view: View) -> Finding:
    data = event.data
    run, rank, generation = text(data, "run"), integer(data, "rank"), integer(data, "generation")
    component, meaning, confidence = _blamed(data)
    page = rank_then(view, run, rank, event.at)
    if _by_oops(view, event, integer(data, "pid") or (page.pid if page else None)):
        component, meaning, confidence = "node", "the kernel ended it after a fault of its own (oops)", 0.95
    step = integer(data, "step")
    done = f"after step {step}" if step >= 0 else "before its first step was done"
    said = data.get("error")
    raised = (
        f"{text(said, 'type')}: {text(said, 'message')} at {text(said, 'where')}" if isinstance(said, Mapping) else ""
    )
    return Finding(
        key=f"{run}/generation {generation}/rank {rank}",
        severity=Severity.CRITICAL,
        struck_at=event.at,
        summary=f"rank {rank} of {run} ended with {text(data, 'exit')} {done}",
        culprit=Culprit(component, view.node, page.gpu if page else None, rank, meaning),
        confidence=confidence,
        evidence=(
            *quoted(
                event, "launcher", f"rank {rank} ended with {text(data, 'exit')} {done}, in phase {text(data, 'phase')}"
            ),
            *quoted(event, "error file", raised),
            *quoted(event, "rank log", *log_lines(data)),
        ),
        cost=downtime(view, event, last_step_at(data, event.at)),
        job=job_of(view, run),
        data={"run": run, "rank": rank, "generation": generation, "step": step},
    )


def _detect(view: View) -> Iterator[Finding]:
    for event in unsolved(view, "rank_exited"):
        if event.data.get("culprit") is True:
            yield _finding(event, view)


def _killed_for_memory(crash: Incident, host_memory: Incident) -> bool:
    """The kernel ends ranks with SIGKILL when memory runs out."""
    return "SIGKILL" in crash.summary and host_memory.severity == Severity.CRITICAL


def _same_rank(crash: Incident, kill: Incident) -> bool:
    return crash.culprit.rank == kill.culprit.rank and "SIGKILL" in crash.summary


RUNBOOK = Runbook(
    first=("opsd report RUN_FOLDER --text", "sacct -j JOB --format=JobID,State,ExitCode,MaxRSS,ReqMem"),
    detect=_detect,
    healed=run_recovered,
    needs=("ranks",),
    verify_s=180.0,
    causes=(
        Cause("gpu_lost", "gpu", within_s=60.0),
        Cause("gpu_xid", "gpu", within_s=60.0),
        Cause("oom_kill", "run", within_s=60.0, fits=_same_rank),
        Cause("host_memory", "node", fits=_killed_for_memory),
    ),
)
