"""Lines of kernels and drivers (``tests/outside/kernel_lines``), each played through the whole agent."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from opsd.scenarios.model import Scenario
from opsd.scenarios.player import ScenarioResult, judge, play

INCIDENTS: Mapping[str, str] = {
    "edac_uncorrected": "machine_check",
    "edac_corrected": "machine_check",
    "mce": "machine_check",
    "oom_kill": "oom_kill",
    "nvme": "disk_errors",
    "io_error": "disk_errors",
    "read_only": "disk_errors",
    "aer_fatal": "pcie_error",
    "aer_recovery": "pcie_error",
    "soft_lockup": "kernel_lockup",
    "hard_lockup": "kernel_lockup",
    "hung_task": "kernel_lockup",
    "cpu_thermal": "cpu_thermal",
    "gpu_init": "gpu_driver_failed",
    "mlx5_tx_timeout": "nic_failed",
    "mlx5_cq_error": "nic_failed",
    "mlx5_health": "nic_failed",
    "mlx5_trouble": "nic_degrading",
    "nic_silent": "nic_failed",
    "nic_unanswered": "nic_failed",
    "peermem": "gpu_driver_failed",
    "lustre": "lustre_client",
    "evicted": "lustre_client",
    "storage_lost": "storage_slow",
    "raid": "disk_errors",
    "oops": "kernel_oops",
    "clock": "clock_unstable",
}
"""The subject of a line, and the incident that it must open."""

ELSEWHERE: Mapping[str, str] = {"was lost": "storage_slow"}
"""Lines whose incident another runbook opens."""

REPEATED: Mapping[str, int] = {"edac_corrected": 100, "cpu_thermal": 2}
"""A storm takes so many of them."""

_AT_S, _AFTER_S, _STORM_S = 10.0, 30.0, 70.0


def lines(folder: Path) -> Iterator[tuple[str, str]]:
    """Each line of the set in ``folder`` with what it is about, or benign, or harmless_event."""
    for source in tomllib.loads((folder / "lines.toml").read_text(encoding="utf-8"))["source"]:
        for about, said in source.items():
            if about != "of":
                yield from ((about, line) for line in said)


def expected(about: str, line: str) -> str | None:
    """The incident that ``line`` must open, None if none may."""
    return next((kind for words, kind in ELSEWHERE.items() if words in line), INCIDENTS.get(about))


def results(folder: Path) -> Iterator[ScenarioResult]:
    """The result of each line."""
    for about, line in lines(folder / "kernel_lines"):
        scenario = timeline(about, line)
        yield judge(scenario, play(scenario, "observe"))


def timeline(about: str, line: str) -> Scenario:
    """A node whose kernel says ``line``, and again if it takes a storm."""
    times = REPEATED.get(about, 1)
    every = 1.0 if times > 10 else _STORM_S
    kind = expected(about, line)
    last = _AT_S + (times - 1) * every
    return Scenario.model_validate({
        "title": about, "duration": last + _AFTER_S,
        "at": [{"t": _AT_S, "every": every, "times": times, "kernel": [line]}],
        "expect": [{"kind": kind, "at": _AT_S, "within": last + _AFTER_S, "culprit": {"node": "n01"}}] if kind else [],
    })  # fmt: skip
