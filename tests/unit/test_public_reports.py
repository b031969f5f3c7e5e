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
from opsd.scenarios.player import play
from opsd.scenarios.verdict import judge

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
