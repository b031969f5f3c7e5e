"""The alerts: current, explained, complete, and about series that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("yaml")

from opsd.commands.main import cli
from opsd.commands.metrics import catalogue
from opsd.dashboards.alerts.catalogue import GROUPS, GUIDES, alerts
from opsd.dashboards.alerts.model import RecordingRule, incident
from opsd.runbooks import RUNBOOKS
from tests.fakes.alert_cases import BURNS, CASES


def test_alerts_and_guides_are_a_bijection() -> None:
    """Every kind of incident has its alert, every alert its guide, and the URL leads to that guide."""
    guides = {alert.runbook for alert in alerts()}
    assert guides == {runbook.kind for runbook in RUNBOOKS} | set(GUIDES)
    for alert in alerts():
        assert alert.as_rule()["annotations"]["runbook_url"].endswith(f"/runbooks/{alert.runbook}")


def test_every_alert_is_tested_by_hand_or_is_about_an_incident() -> None:
    """A new alert without a test fails here, and so does a test of an alert that is gone."""
    of_incidents = {alert.name for alert in alerts() if alert.expr == incident(alert.runbook)}
    burns = {alert.window for alert in alerts() if alert.name == "GoodputBurn"}
    assert {alert.name for alert in alerts()} == of_incidents | set(CASES) | {"GoodputBurn"}
    assert of_incidents & set(CASES) == set()
    assert burns == set(BURNS)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name + alert.window)
def test_an_alert_says_all_that_the_person_on_call_needs(alert) -> None:
    """Summary, description, severity, how long it must hold, what to do next; node and GPU where it is about one."""
    rule = alert.as_rule()
    assert rule["for"].endswith(("s", "m"))
    assert rule.get("labels", {}).get("severity") or "severity)" in alert.expr
    promised = {"summary", "description", "next_step", "runbook_url"}
    promised |= {"gpu": {"node", "gpu", "job", "cost"}, "node": {"node", "job", "cost"}, "run": {"job", "cost"}}.get(
        alert.scope, set()
    )
    assert promised <= rule["annotations"].keys()


def test_rules_use_only_series_that_exist() -> None:
    """A rule about a series that nobody writes would be silent for ever."""
    exported = {metric.name for _, metric in catalogue()}
    rules = [rule for group in GROUPS for rule in group.rules]
    recorded = {rule.name for rule in rules if isinstance(rule, RecordingRule)}
    for rule in rules:
        words = set(re.findall(r"(?<![\w:])(?:opsd|DCGM_FI)_\w+", rule.expr))
        levels = set(re.findall(r"\b(?:instance|run|cluster)\w*:[\w:]+", rule.expr))
        assert (words - exported, levels - recorded) == (set(), set()), rule.name


def test_the_command_writes_and_checks_the_rules(tmp_path: Path) -> None:
    """Into any folder; a file that was changed is named, and the exit code says so."""
    folder = tmp_path / "rules"
    assert CliRunner().invoke(cli, ["alerts", "build", "--out", str(folder)]).exit_code == 0
    assert CliRunner().invoke(cli, ["alerts", "check", "--out", str(folder)]).exit_code == 0
    (folder / "data.yml").write_text("groups: []")
    checked = CliRunner().invoke(cli, ["alerts", "check", "--out", str(folder)])
    assert checked.exit_code == 1
    assert "data.yml is not current; run: opsd alerts build" in checked.output


def test_the_links_are_those_of_agents_with_tls_if_asked_for(tmp_path: Path) -> None:
    """An agent with a certificate answers nothing else."""
    https = ["--out", str(tmp_path), "--scheme=https"]
    assert CliRunner().invoke(cli, ["alerts", "build", *https]).exit_code == 0
    assert CliRunner().invoke(cli, ["alerts", "check", *https]).exit_code == 0
    links = re.findall(r"runbook_url: (\w+)://", "".join(path.read_text() for path in tmp_path.glob("*.yml")))
    assert len(links) == len(alerts())
    assert {*links} == {"https"}


def test_the_links_lead_to_a_site_with_the_runbooks_if_one_is_named(tmp_path: Path) -> None:
    """Which is there when no agent is."""
    site = ["--out", str(tmp_path), "--runbooks=https://wiki.example/opsd/"]
    assert CliRunner().invoke(cli, ["alerts", "build", *site]).exit_code == 0
    assert CliRunner().invoke(cli, ["alerts", "check", *site]).exit_code == 0
    assert "runbook_url: https://wiki.example/opsd/gpu_lost\n" in (tmp_path / "availability.yml").read_text()
