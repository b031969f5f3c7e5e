"""The rules that are written by hand: complete, explained, alike, and about series that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("yaml")

from opsd.commands.main import cli
from opsd.commands.metrics import catalogue
from opsd.dashboards.alerts import Rule, alerts, linked, rules
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.lib.guides import guides
from tests.fakes.alert_cases import BURNS, CASES

KINDS = {book.kind for book in RUNBOOKS}
SEVERITIES = {"critical", "warning", "info"}
OF_A_FILE_SYSTEM = {"storage_full": ', mount=""'}
"""Kinds that have another alert for what all nodes report, and how theirs leaves that out."""
ABOUT_INCIDENTS = {"IncidentEscalated"}
"""Alerts about incidents of every kind."""


def of_kind(alert: Rule) -> bool:
    """Whether it is about the incidents of one kind on one node."""
    return alert.runbook in KINDS and not alert.shared


def test_alerts_and_guides_are_a_bijection() -> None:
    """Every kind of incident has its alert, every alert its guide, and the URL leads to that guide."""
    assert {alert.runbook for alert in alerts()} == set(guides())
    assert sorted(alert.runbook for alert in alerts() if of_kind(alert)) == sorted(KINDS)
    for alert in alerts():
        guide = "{{ $labels.kind }}" if of_kind(alert) else alert.runbook
        assert alert.annotations["runbook_url"].endswith(f"/runbooks/{guide}"), alert.name
        assert alert.annotations["next_step"].endswith(f"opsd runbook show {guide}"), alert.name


def test_an_alert_of_a_kind_is_a_view_of_its_incidents_and_nothing_else() -> None:
    """At once, with the incident's severity. No other alert looks at incidents, and none at what an agent judges."""
    for alert in alerts():
        if of_kind(alert):
            mine = f'kind="{alert.runbook}"{OF_A_FILE_SYSTEM.get(alert.runbook, "")}'
            assert alert.expr == f"instance:opsd_incidents:open{{{mine}}}", alert.name
            assert (alert.severity, alert.hold) == (None, "0s"), alert.name
        elif not alert.shared:
            assert ("opsd_incidents" in alert.expr) == (alert.name in ABOUT_INCIDENTS), alert.name


def test_every_alert_is_tested_by_hand_or_is_about_an_incident() -> None:
    """A new alert without a test fails here, and so does a test of an alert that is gone."""
    of_incidents = {alert.name for alert in alerts() if of_kind(alert) and alert.runbook not in OF_A_FILE_SYSTEM}
    burns = {alert.labels["window"] for alert in alerts() if alert.name == "GoodputBurn"}
    assert {alert.name for alert in alerts()} == of_incidents | set(CASES) | {"GoodputBurn"}
    assert of_incidents & set(CASES) == set()
    assert burns == set(BURNS)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name + alert.labels.get("window", ""))
def test_an_alert_says_all_that_the_person_on_call_needs(alert: Rule) -> None:
    """Summary, description, severity, how long it must hold, what to do next; node and job where it is about one."""
    assert alert.hold.endswith(("s", "m"))
    assert alert.severity in SEVERITIES or "severity" in alert.expr or "opsd_incidents:open" in alert.expr
    promised = {"summary", "description", "next_step", "runbook_url"}
    promised |= set() if alert.shared else {"node", "job", "cost"}
    promised |= {"job", "cost"} if "by (cluster, run)" in alert.expr else set()
    promised |= {"gpu"} if of_kind(alert) else set()
    promised |= {"who_acts"} if of_kind(alert) or alert.name in ABOUT_INCIDENTS else set()
    assert promised <= alert.annotations.keys()


def test_rules_use_only_series_that_exist() -> None:
    """A rule about a series that nobody writes would be silent for ever."""
    exported = {metric.name for _, metric in catalogue()}
    recorded = {rule.name for rule in rules() if not rule.alert}
    for rule in rules():
        text = " ".join((rule.expr, *rule.annotations.values()))
        words = set(re.findall(r"(?<![\w:])(?:opsd|DCGM_FI)_\w+", text))
        levels = set(re.findall(r"\b(?:instance|run|cluster)\w*:[\w:]+", rule.expr))
        assert (words - exported, levels - recorded) == (set(), set()), rule.name


def test_the_command_writes_and_checks_the_rules(tmp_path: Path) -> None:
    """Into any folder; a file that was changed is named, and the exit code says so."""
    folder = tmp_path / "rules"
    assert CliRunner().invoke(cli, ["alerts", "build", "--out", str(folder)]).exit_code == 0
    assert CliRunner().invoke(cli, ["alerts", "check", "--out", str(folder)]).exit_code == 0
    (folder / "runs.yml").write_text("groups: []")
    checked = CliRunner().invoke(cli, ["alerts", "check", "--out", str(folder)])
    assert checked.exit_code == 1
    assert f"runs.yml is not current; run: opsd alerts build --out {folder}" in checked.output


def test_the_links_are_those_of_agents_with_tls_if_asked_for(tmp_path: Path) -> None:
    """An agent with a certificate answers nothing else."""
    https = ["--out", str(tmp_path), "--scheme=https"]
    assert CliRunner().invoke(cli, ["alerts", "build", *https]).exit_code == 0
    assert CliRunner().invoke(cli, ["alerts", "check", *https]).exit_code == 0
    links = re.findall(r"runbook_url: (\w+)://", "".join(path.read_text() for path in tmp_path.glob("*.yml")))
    assert len(links) == sum(text.count("runbook_url:") for text in linked().values())
    assert {*links} == {"https"}


def test_the_links_lead_to_a_site_with_the_runbooks_if_one_is_named(tmp_path: Path) -> None:
    """Which is there when no agent is."""
    site = ["--out", str(tmp_path), "--runbooks=https://wiki.example/opsd/"]
    assert CliRunner().invoke(cli, ["alerts", "build", *site]).exit_code == 0
    assert CliRunner().invoke(cli, ["alerts", "check", *site]).exit_code == 0
    assert "runbook_url: https://wiki.example/opsd/plan_exceeded\n" in (tmp_path / "runs.yml").read_text()
