"""What people have reported in public: faults get their name, and oddities of healthy nodes stay silent."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from opsd.bench.outside import FOLDER
from opsd.scenarios import node
from opsd.scenarios.model import Scenario
from opsd.scenarios.player import judge, play

REPORTS: Mapping[str, Sequence[Mapping[str, Any]]] = tomllib.loads(
    (FOLDER / "reports/reports.toml").read_text(encoding="utf-8")
)
AT_S, LATER_S, BURST_S = 10.0, 10.0, 65.0


def timeline(report: Mapping[str, Any]) -> Scenario:
    """The report as a scenario of an agent that observes."""
    gpus = report.get("gpu")
    change = {key: report[key] for key in ("kernel", "set") if key in report}
    moments = [
        {
            "t": AT_S,
            "every": BURST_S,
            "times": report.get("times", 1),
            **change,
            **({} if gpu is None else {"gpu": gpu}),
        }
        for gpu in (gpus if isinstance(gpus, list) else [gpus])
    ]
    if "later" in report or "after" in report:
        moments.append({"t": AT_S + LATER_S, "kernel": report.get("later", ()), "set": report.get("after", {})})
    if "kind" not in report and "kernel" not in report:
        moments = [{**moment, "t": 0.0} if moment["t"] == AT_S else moment for moment in moments]
    within = report.get("within", 40.0)
    seconds = report.get("seconds", within + 10.0) + BURST_S * (report.get("times", 1) - 1)
    expected = {key: report[key] for key in ("kind", "culprit", "severity", "evidence") if key in report}
    return Scenario.model_validate({
        "title": report["of"], "duration": AT_S + seconds, "modes": ["observe"], "at": moments,
        "job": {"ranks": 0} if report.get("idle") else {"world_size": 8},
        "expect": [{**expected, "at": AT_S, "within": within}] if expected else [],
    })  # fmt: skip


def test_there_are_as_many_as_the_page_says() -> None:
    """And none twice."""
    assert {about: len({report["of"] for report in reports}) for about, reports in REPORTS.items()} == {
        "fault": 31,
        "oddity": 28,
    }


@pytest.mark.parametrize("report", [*REPORTS["fault"], *REPORTS["oddity"]], ids=lambda report: report["of"][:70])
def test_a_fault_gets_its_name_and_an_oddity_is_silent(
    report: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind, culprit and severity of a fault are right, and no other incident opens."""
    if model := report.get("model"):
        identity = node._identity
        monkeypatch.setattr(node, "_identity", lambda index: replace(identity(index), model=model))
    scenario = timeline(report)
    assert judge(scenario, play(scenario, "observe")).problems == ()


NO_ECC = ("opsd_gpu_ecc_errors_total", "opsd_gpu_row_remap_pending", "DCGM_FI_DEV_ROW_REMAP_FAILURE",
          "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
          "opsd_gpu_recovery_action", "DCGM_FI_DEV_MEMORY_TEMP", "opsd_gpu_nvlink_up",
          "opsd_gpu_nvlink_errors_total")  # fmt: skip
NO_INFINIBAND = ("opsd_ib_port_info", "opsd_ib_port_state", "opsd_ib_port_physical_state",
                 "opsd_ib_port_rate_bytes_per_second", "opsd_ib_errors_total")  # fmt: skip
IDLE_LINK = {"opsd_gpu_pcie_link_generation": 1}
QUIET = {
    "workstation": (
        2,
        {**dict.fromkeys((*NO_ECC, *NO_INFINIBAND), "absent"), **IDLE_LINK, "opsd_gpu_pcie_link_width": 8},
    ),
    "instances of GPUs": (4, {**IDLE_LINK, "DCGM_FI_DEV_GPU_UTIL": "absent"}),
    "eight links": (8, {f"opsd_gpu_nvlink_up{{link={link}}}": 0 for link in range(8, 18)}),
}
"""Nodes without work: their GPUs, and how their series differ from those of eight H100."""


@pytest.mark.long
@pytest.mark.parametrize("name", QUIET)
def test_an_hour_of_a_quiet_node_is_silent(name: str) -> None:
    """Cards without ECC and InfiniBand, GPUs that are split, and boards that leave links unconnected."""
    gpus, differs = QUIET[name]
    scenario = Scenario.model_validate({
        "title": name, "duration": 3600.0, "gpus": gpus, "job": {"ranks": 0}, "modes": ["act"],
        "at": [{"t": 0, "set": differs}],
    })  # fmt: skip
    assert judge(scenario, play(scenario, "act")).problems == ()
