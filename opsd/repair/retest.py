"""What is wrong with a node by its preflight, and the test after a remedy.

Which remedy a fault calls for first, and which preflight checks prove that it is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from opsd.preflight.base import Verdict
from opsd.preflight.network.plan import JOIN
from opsd.preflight.report import Report, ReportError, failed_checks
from opsd.repair.repair_plan import NO_HARDWARE, REMEDIES, Remedy


@dataclass(frozen=True, slots=True)
class RepairRule:
    """``first`` is the lowest remedy that can help, None if checks that failed say so.

    ``checks`` load or read what failed; one of them has to pass.
    """

    first: Remedy | None
    checks: tuple[str, ...]

    @property
    def of_the_network(self) -> bool:
        """Whether it is one of the cards for the network between nodes, which only a partner can put under load."""
        return "infiniband" in self.checks


_GPU: Final = ("gpu_inventory", "gpu_health", "gpu_burn", "gpu_memory")
_LINKS: Final = ("gpu_inventory", "gpu_health", "gpu_peer", "collectives")

FAULTS: Final[Mapping[str, RepairRule]] = {
    "zombie_gpu_process": RepairRule(Remedy.PROCESSES, ("leftovers", "gpu_inventory", "gpu_health")),
    "gpu_xid": RepairRule(Remedy.RESET, _GPU),
    "gpu_ecc": RepairRule(Remedy.RESET, _GPU),
    "gpu_row_remap": RepairRule(Remedy.RESET, _GPU),
    "silent_corruption": RepairRule(Remedy.RESET, _GPU),
    "nvlink_errors": RepairRule(Remedy.RESET, _LINKS),
    "fabric_manager": RepairRule(Remedy.RELOAD, _LINKS),
    "gpu_driver_failed": RepairRule(Remedy.RELOAD, _GPU),
    "driver_hang": RepairRule(Remedy.RELOAD, _GPU),
    "gpu_lost": RepairRule(Remedy.REBOOT, _GPU),
    "pcie_error": RepairRule(Remedy.REBOOT, ("gpu_inventory", "gpu_health", "gpu_host_copy")),
    "pcie_degraded": RepairRule(Remedy.REBOOT, ("gpu_inventory", "gpu_health", "gpu_host_copy")),
    "kernel_lockup": RepairRule(Remedy.REBOOT, ("kernel_log", "cpu", "memory")),
    "machine_check": RepairRule(Remedy.REBOOT, ("kernel_log", "cpu", "memory")),
    "nic_failed": RepairRule(Remedy.REBOOT, ("infiniband",)),
    "preflight": RepairRule(None, ()),
}
"""By the kind of incident in the reason of the drain. Other kinds do not start a repair: fans, cables, disks, power,
and drains by a person."""

_OF_GPUS: Final = (*_GPU, *_LINKS, "gpu_burn_fp8", "gpu_host_copy", "nvbandwidth", "nccl_tests", "dcgm")
_BY_CHECK: Final = {"leftovers": Remedy.PROCESSES, **dict.fromkeys(_OF_GPUS, Remedy.RESET)}
"""The lowest remedy that can help where a check has failed."""

NOT_HARDWARE: Final = frozenset(
    {
        "clock",
        "hugepages",
        "leftovers",
        "limits",
        "pressure",
        "run_alerts",
        "run_config",
        "run_data",
        "run_evaluation",
        "run_initial",
        "run_steps",
        "storage_shared",
        "versions",
    }
)
"""Checks of users' processes, settings, servers and runs: with these alone a node has nothing to be replaced for."""

_ASKS: Final = {1: Remedy.RESET, 4: Remedy.RESET, 6: Remedy.RESET, 2: Remedy.REBOOT, 7: Remedy.REBOOT}
"""What the driver's recovery action (nvmlDeviceGpuRecoveryAction_t) asks for."""


def curable(failed: Iterable[str]) -> bool:
    """Whether a preflight that ``failed`` in these checks is a matter for the ladder: a missing mount is none."""
    checks = frozenset(failed)
    return bool(checks) and checks <= _BY_CHECK.keys()


def begin_at(fault: RepairRule, reason: str, recovery_actions: Iterable[int]) -> Remedy:
    """The first remedy: the fault's own, or that of checks in the drain's ``reason``; higher if the driver asks."""
    failed = (_BY_CHECK.get(check, Remedy.RESET) for check in failed_checks(reason))
    first = fault.first or max(failed, default=Remedy.RESET, key=REMEDIES.index)
    asked = (_ASKS[action] for action in recovery_actions if action in _ASKS)
    return max((first, *asked), key=REMEDIES.index)


# The test after a remedy: `opsd preflight`, first the checks that fit the fault, then what a return needs.


RETEST_S = 4 * 3600.0
"""Longer than any profile that ends by itself; then the test has failed."""
PAIR_S = 900.0
"""The same of a measurement of the network between two nodes."""
JOIN_S = 120.0
"""Within which both have started it."""
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

    def with_partner(self, hosts: Sequence[str], port: int, stop: Callable[[], str]) -> Retested:
        """Measure the network between ``hosts``: this node, at whose ``port`` they meet, and one that runs its half."""


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
    join_s: float = JOIN_S

    def __call__(self, checks: Sequence[str], stop: Callable[[], str] = str) -> Retested:
        """Run ``checks``, and if they pass, the whole profile, until ``stop`` says why they must end, "" if not.

        One of ``checks`` has to have passed, not only not failed: a node without a working driver has none that apply.
        """
        possible = [name for name in checks if name not in self.skip]
        if possible and isinstance(fitting_ones := self._proved(stop, "--only", ",".join(possible)), Retested):
            return fitting_ones
        whole = self._proved(stop)
        if isinstance(whole, Retested):
            return whole
        proved = [r.check for r in whole.results if r.verdict in (Verdict.PASS, Verdict.WARN)]
        fitting = [name for name in proved if not checks or name in checks]
        if not fitting:
            return Retested(False, f"none of {', '.join(checks)} could be run, which would prove that it is over")
        return Retested(True, f"passed {', '.join(fitting)} and preflight {self.profile}")

    def as_spare(self, stop: Callable[[], str] = str) -> str:
        """Test the node as a spare until ``stop`` says why that must end, and say what failed, "" for nothing."""
        report = self._on_its_own("spare", stop=stop)
        return report.detail if isinstance(report, Retested) else "" if report.passed else _failures(report)

    def with_partner(self, hosts: Sequence[str], port: int, stop: Callable[[], str] = str) -> Retested:
        """Measure the network between ``hosts``: this node, at whose ``port`` they meet, and one that runs its half."""
        meeting = f"--hosts={','.join(hosts)}", "--node=0", f"--rendezvous={hosts[0]}:{port}"
        effort = f"--profile={'quick' if self.profile == 'quick' else 'standard'}", f"--join-timeout={self.join_s:g}"
        report = self._run("network", ["network", *meeting, *effort], stop, min(PAIR_S, self.deadline_s))
        if isinstance(report, Retested):
            return report
        met = not any(result.failed and result.check == JOIN.name for result in report.results)
        unknown = not met or report.word == "unknown"  # a port that a firewall closes is no fault of the network's
        if not report.passed:
            return Retested(False, f"{NO_HARDWARE * unknown}{_failures(report)}")
        warned = (sentence for r in report.results if r.verdict is Verdict.WARN for sentence in r.sentences)
        return Retested(True, next(warned, "").rstrip("."))

    def _proved(self, stop: Callable[[], str], *options: str) -> Report | Retested:
        """A preflight that was passed, or what is to be said of one that was not."""
        report = self._on_its_own(self.profile, *options, stop=stop)
        return report if isinstance(report, Retested) or report.passed else Retested(False, _found(report))

    def _on_its_own(self, profile: str, *options: str, stop: Callable[[], str]) -> Report | Retested:
        return self._run(profile, ["--quiet", f"--profile={profile}", *options], stop, self.deadline_s)

    def _run(self, what: str, options: Sequence[str], stop: Callable[[], str], deadline_s: float) -> Report | Retested:
        """The report of this preflight, or what is to be said if there is none."""
        with tempfile.TemporaryDirectory(prefix="opsd-repair-") as folder:
            file = Path(folder) / "report.json"
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "opsd", "preflight", *self.given, *options, f"--json={file}"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            try:
                said = self._watched(process, stop, deadline_s)
            except _StoppedError as error:
                return Retested(False, f"preflight {what} was stopped: {error}", stopped=True)
            except TimeoutError:
                return Retested(False, f"preflight {what} has not ended within {deadline_s:g} s")
            finally:  # also when this program is ended: the load goes with it
                _end(process)
            try:
                return Report.from_json(file.read_bytes())
            except (OSError, ReportError):
                last = said.decode(errors="replace").strip().splitlines()[-1:]
                told = "".join(last)[:300] or "it said nothing"
                return Retested(False, f"{NO_HARDWARE}preflight {what} made no report: {told}")

    def _watched(self, process: subprocess.Popen[bytes], stop: Callable[[], str], deadline_s: float) -> bytes:
        """The last output of the process. Raises _StoppedError if that may not be waited for, TimeoutError."""
        deadline = time.monotonic() + deadline_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                return process.communicate(timeout=min(left, self.look_s))[1]
            except subprocess.TimeoutExpired:
                if why := stop():
                    raise _StoppedError(why) from None
        raise TimeoutError


class _StoppedError(Exception):
    """A test that may not come to its end; the message says why."""


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
