"""The test after a remedy: `opsd preflight`, first the checks that fit the fault, then what a return needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from opsd.preflight.base import Verdict
from opsd.preflight.report import Report, ReportError
from opsd.repair.faults import NOT_HARDWARE
from opsd.repair.ladder import NO_HARDWARE

RETEST_S = 4 * 3600.0
"""Longer than any profile that ends by itself; then the test has failed."""
LOOK_S, TIDY_S = 10.0, 15.0
"""Seconds between two looks whether the test may go on, and those that it has to end its load."""


@dataclass(frozen=True, slots=True)
class Retested:
    """Whether the node is proved good, and in one sentence what was found.

    ``stopped``: the test had to make way, and has found nothing.
    """

    passed: bool
    detail: str
    stopped: bool = False


class Tests(Protocol):
    """The tests of the node, until ``stop`` says why they must end, "" if not. Raise nothing."""

    def __call__(self, checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        """Whether the node is good, by ``checks`` and all that a return needs."""

    def as_spare(self, stop: Callable[[], str]) -> str:
        """Test the node as a spare, and say what failed, "" for nothing."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """Runs preflights of this node in processes of their own, with the options ``given`` (--config, --set).

    Checks in ``skip`` are never run on this node (preflight.skip).
    """

    given: Sequence[str]
    profile: str
    skip: Sequence[str] = ()
    deadline_s: float = RETEST_S
    look_s: float = LOOK_S

    def __call__(self, checks: Sequence[str], stop: Callable[[], str] = str) -> Retested:
        """Run ``checks``, and if they pass, the whole profile, until ``stop`` says why they must end, "" if not.

        One of ``checks`` has to have passed, not only not failed: a node without a working driver has none that apply.
        """
        told: list[str] = []

        def noting() -> str:
            told.append(stop())
            return told[-1]

        possible = [name for name in checks if name not in self.skip]
        if possible:
            report, problem = self._run(self.profile, "--only", ",".join(possible), stop=noting)
            if report is None or not report.passed:
                return Retested(False, problem if report is None else _found(report), report is None and any(told))
        whole, problem = self._run(self.profile, stop=noting)
        if whole is None or not whole.passed:
            return Retested(False, problem if whole is None else _found(whole), whole is None and any(told))
        proved = [r.check for r in whole.results if r.verdict in (Verdict.PASS, Verdict.WARN)]
        fitting = [name for name in proved if not checks or name in checks]
        if not fitting:
            return Retested(False, f"none of {', '.join(checks)} could be run, which would prove that it is over")
        return Retested(True, f"passed {', '.join(fitting)} and preflight {self.profile}")

    def as_spare(self, stop: Callable[[], str] = str) -> str:
        """Test the node as a spare until ``stop`` says why that must end, and say what failed, "" for nothing."""
        report, problem = self._run("spare", stop=stop)
        return problem if report is None else "" if report.passed else _failures(report)

    def _run(self, profile: str, *options: str, stop: Callable[[], str] = str) -> tuple[Report | None, str]:
        with tempfile.TemporaryDirectory(prefix="opsd-repair-") as folder:
            file = Path(folder) / "report.json"
            command = [sys.executable, "-P", "-m", "opsd", "preflight", "--quiet", f"--json={file}"]
            process = subprocess.Popen(
                [*command, f"--profile={profile}", *options, *self.given],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            try:
                said = self._watched(process, stop)
            except _StoppedError as error:
                return None, f"preflight {profile} {error}"
            finally:  # also when this program is ended: the load goes with it
                _end(process)
            try:
                return Report.from_json(file.read_bytes()), ""
            except (OSError, ReportError):
                last = said.decode(errors="replace").strip().splitlines()[-1:]
                told = "".join(last)[:300] or "it said nothing"
                return None, f"{NO_HARDWARE}preflight {profile} made no report: {told}"

    def _watched(self, process: subprocess.Popen[bytes], stop: Callable[[], str]) -> bytes:
        """What the process has said at its end. Raises _StoppedError where that is not to be waited for."""
        deadline = time.monotonic() + self.deadline_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                return process.communicate(timeout=min(left, self.look_s))[1]
            except subprocess.TimeoutExpired:
                if why := stop():
                    raise _StoppedError(f"was stopped: {why}") from None
        raise _StoppedError(f"has not ended within {self.deadline_s:g} s")


class _StoppedError(Exception):
    """A test that may not or will not come to its end."""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the preflight end its checks, then kill it; its checks die with it."""
    if process.poll() is not None:
        return
    with suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(TIDY_S)
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _found(report: Report) -> str:
    failed = {result.check for result in report.results if result.failed}
    elsewhere = failed <= NOT_HARDWARE if failed else report.interrupted
    return f"{NO_HARDWARE * elsewhere}{_failures(report)}"


def _failures(report: Report) -> str:
    failed = [result for result in report.results if result.failed]
    if not failed:
        return f"preflight {report.profile} was interrupted or had nothing to check"
    first = next(iter(failed[0].sentences), failed[0].title).rstrip(".")
    return f"{', '.join(result.check for result in failed)} failed: {first}"
