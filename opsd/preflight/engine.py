"""Runs checks and collects their answers in a report.

Checks that only read state run in parallel; those that measure a speed run afterwards, one at a time.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from opsd import __version__
from opsd.preflight.base import Check, Context, Outcome, Verdict
from opsd.preflight.judge import Yardsticks, judge
from opsd.preflight.report import Report, Result
from opsd.preflight.supervise import Answer, supervise

_SIDE_BY_SIDE: Final = 4
_NVIDIA_VENDOR: Final = "0x10de"
_GPU_CLASSES: Final = ("0x0300", "0x0302")
_SIMULATED: Final = "OPSD_SIMULATED_NVML"
NO_RUN: Final = "no run was named; --train CONFIG checks one"


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
    answer = unmet_need(check, check_run.context, root=os.geteuid() == 0)
    if answer is None:
        answer = await supervise(
            check,
            replace(check_run.context, seconds=seconds),
            deadline_s=seconds * check_run.patience + check_run.grace_s,
            log=log,
            progress=lambda share, subject: listener.progress(check, share, subject),
            python=check_run.python if "torch" in check.needs else sys.executable,
        )
    result = Result(
        check.name,
        check.title,
        answer.verdict,
        check.name in check_run.optional,
        answer.reason,
        started=started,
        seconds=time.monotonic() - clock,
        runbook=check.runbook,
        log=str(log) if log.exists() and log.stat().st_size else "",
    )
    return result if answer.outcome is None else judged(result, check, answer.outcome, check_run.yardsticks(check))


def judged(result: Result, check: Check, outcome: Outcome, yardsticks: Yardsticks) -> Result:
    """``result`` with the verdict on ``outcome``."""
    judgement = judge(check, outcome, result.started, yardsticks)
    return replace(
        result,
        verdict=judgement.verdict,
        values=judgement.values,
        findings=judgement.findings,
        facts=outcome.facts,
    )


def _unfinished(check_run: CheckRun, check: Check) -> Result:
    return Result(
        check.name,
        check.title,
        Verdict.COULD_NOT_RUN,
        check.name in check_run.optional,
        "interrupted before it was done",
    )


def unmet_need(check: Check, context: Context, *, root: bool) -> Answer | None:
    """Why ``check`` cannot be started here, None if it can. ``root``: this process has root's rights."""
    if "root" in check.needs and not root:
        return Answer(None, Verdict.COULD_NOT_RUN, "it needs root; run it with sudo or from the prolog")
    if "run" in check.needs and not context.train:
        return Answer(None, Verdict.NOT_APPLICABLE, NO_RUN)
    if "gpu" in check.needs and context.device == "cuda":
        return _unfit_gpus(check, context)
    return None


def _unfit_gpus(check: Check, context: Context) -> Answer | None:
    """GPUs on the PCI bus suffice, whether the driver sees them or not; simulated ones can be queried but not used."""
    if os.environ.get(_SIMULATED):
        computes = "torch" in check.needs
        return Answer(None, Verdict.NOT_APPLICABLE, "simulated GPUs cannot compute") if computes else None
    if count_gpus(context):
        return None
    if context.gpus:
        reason = f"the node must have {context.gpus} GPUs and there is no NVIDIA GPU on its PCI bus"
        return Answer(None, Verdict.FAIL, reason)
    return Answer(None, Verdict.NOT_APPLICABLE, "no NVIDIA GPU on this node")


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
