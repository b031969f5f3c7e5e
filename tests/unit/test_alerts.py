"""The alerts: complete, explained, and fired when they should; what Alertmanager makes of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("yaml")
import json
import shutil
import subprocess
from collections.abc import Iterable, Sequence

import pytest
import yaml

from opsd.commands.main import cli
from opsd.commands.metrics import catalogue
from opsd.dashboards.alerts import FOLDER, Rule, alerts, linked, rules
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.lib.guides import guides
from tests.fakes.alert_cases import BURNS, CASES, GPU, NODE, SHARED, Case, Series

# The rules that are written by hand: complete, explained, alike, and about series that exist.


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


ALERTS_FIRE = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)


# Each alert fires when it should and only then: promtool runs the rules on series of ``tests.fakes.alert_cases``.


RULES = tuple(sorted(FOLDER.glob("*.yml")))

LOST = f'opsd_incidents{{{GPU},kind="gpu_lost",severity="critical",state="open"}}'


def case_of(alert: Rule) -> Case:
    """Of alerts about incidents there is one for each kind, and they differ in nothing else."""
    if alert.shared and alert.name in SHARED:
        return SHARED[alert.name]
    if alert.name in CASES:
        return CASES[alert.name]
    series = f'opsd_incidents{{{NODE},kind="{alert.runbook}",severity="critical",state="acting"}}'
    of_gpu = f'opsd_incidents{{{GPU},kind="{alert.runbook}",severity="critical",state="open"}}'
    symptom = f'opsd_incidents{{{NODE},kind="{alert.runbook}",severity="critical",state="symptom"}}'
    held = f'opsd_incidents{{{NODE},kind="{alert.runbook}",severity="critical",state="acknowledged"}}'
    other = f'opsd_incidents{{{NODE},kind="another",severity="critical",state="acting"}}'
    return Case(
        [{series: "0x30 1x20"}, {of_gpu: "1x50"}], [{series: "1x30 0x20", other: "1x50", held: "1x50", symptom: "1x50"}]
    )


def promtool_group(
    series: Series, at: str, selector: str, expected: Sequence[str], name: str, interval: str
) -> dict[str, object]:
    return {
        "name": name,
        "interval": interval,
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"count by (alertname, severity, alertstate) (ALERTS{{{selector}}})",
                "eval_time": at,
                "exp_samples": [{"labels": labels, "value": 1} for labels in expected],
            }
        ],
    }


def groups_of(
    name: str, severity: str | None, case: Case, extra: str = "", interval: str = "15s"
) -> list[dict[str, object]]:
    selector = f'alertname="{name}"{extra}'
    fired = f'{{alertname="{name}",alertstate="firing",severity="{severity or "critical"}"}}'
    said = [("fires", [fired], case.fires), ("is quiet", [], case.quiet)]
    return [
        promtool_group(series, case.at, selector, expected, f"{name} {what} {number}", interval)
        for what, expected, every in said
        for number, series in enumerate(every)
    ]


def promtool(folder: Path, groups: Sequence[dict[str, object]], rules: Iterable[Path] = RULES) -> str:
    """What promtool says of the tests, "" if they pass."""
    file = folder / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(path) for path in rules], "tests": list(groups)}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@ALERTS_FIRE
def test_promtool_finds_nothing_wrong() -> None:
    """Not even what is only bad style."""
    files = [str(path) for path in RULES]
    checked = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


@ALERTS_FIRE
def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    """Each branch of each expression, and the nearest thing that is no reason to wake somebody."""
    tests = [
        group
        for alert in alerts()
        if alert.name != "GoodputBurn"
        for group in groups_of(
            alert.name, alert.severity, case_of(alert), f',severity="{alert.severity}"' if alert.severity else ""
        )
    ]
    assert promtool(tmp_path, tests) == ""


@ALERTS_FIRE
@pytest.mark.slow
@pytest.mark.long
def test_goodput_is_watched_over_short_and_long_windows(tmp_path: Path) -> None:
    """A run that stands still pages within the hour; one that loses a little is noticed within days."""
    tests = [
        group
        for alert in alerts()
        if (window := alert.labels.get("window", ""))
        for group in groups_of(alert.name, alert.severity, BURNS[window], f',window="{window}"', "1m")
    ]
    assert promtool(tmp_path, tests, [FOLDER / "runs.yml"]) == ""


@ALERTS_FIRE
def test_a_test_that_does_not_hold_is_noticed(tmp_path: Path) -> None:
    """An alert that should fire and does not makes promtool complain."""
    wrong = groups_of("GpuLost", "critical", Case([{LOST: "0x50"}], []))
    assert "GpuLost" in promtool(tmp_path, wrong)


def message_group(name: str, series: Series, labels: dict[str, str], message: dict[str, str]) -> dict[str, object]:
    """A test of promtool: after ten minutes the alert has these labels and annotations."""
    return {
        "interval": "15s",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": "10m",
                "alertname": name,
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": message}],
            }
        ],
    }


INFO = 'opsd_gpu_job_info{{instance="{}",gpu="{}",job_id="4242",rank="{}"}}'

INSTANCE = "node-17:9477"


@ALERTS_FIRE
def test_a_message_names_node_gpu_job_cost_and_next_step(tmp_path: Path) -> None:
    """As Alertmanager gets it, for an alert about a GPU on which a job of three GPUs works.

    The runbook is on another node than the ill one, if one lives.
    """
    series = {
        LOST: "1x50",
        INFO.format(INSTANCE, 3, 0): "1x50",
        INFO.format(INSTANCE, 4, 1): "1x50",
        INFO.format("node-18:9477", 0, 2): "1x50",
        f'opsd_incidents_gpu_seconds_total{{{NODE},kind="gpu_lost"}}': "0+22.5x50",
        f'opsd_incidents_gpu_seconds_total{{{NODE},kind="gpu_hot"}}': "0+900x50",
        f'opsd_incident_gpu_seconds{{{NODE},kind="gpu_lost",gpu="3"}}': "1800x50",
        f'opsd_incident_gpu_seconds{{{NODE},kind="gpu_lost",gpu="4"}}': "9000x50",
        f'opsd_incident_brief_info{{{NODE},kind="gpu_lost",gpu="3",incident="i",acts="you act: opsd only observes",'
        'command="opsd drain node-17 --incident i",on="node-17"}': "1x50",
    }
    message = {
        "summary": "GPU 3 of node-17:9477 is lost",
        "description": "The driver no longer reaches the GPU. Jobs on it hang or crash until the node is reset.",
        "node": "node-17",
        "gpu": "3",
        "job": "4242",
        "cost": "3 GPUs of job 4242 are affected; this kind of incident costs the node 1.5 GPU-hours per hour; "
        "this one has cost 0.5 GPU-hours so far",
        "who_acts": "you act: opsd only observes",
        "next_step": "on node-17: opsd drain node-17 --incident i; opsd runbook show gpu_lost",
    }
    labels = {"instance": INSTANCE, "kind": "gpu_lost", "gpu": "3", "severity": "critical"}
    own = {f'up{{{NODE},job="opsd"}}': "1x50"}
    other = {'up{instance="node-18:9477",job="opsd"}': "1x50"}
    tests = [
        message_group(
            "GpuLost", {**series, **up}, labels, {**message, "runbook_url": f"http://{host}/runbooks/gpu_lost"}
        )
        for up, host in (({**own, **other}, "node-18:9477"), (own, INSTANCE), ({}, "localhost:9477"))
    ]
    assert promtool(tmp_path, tests) == ""


@ALERTS_FIRE
def test_a_node_that_is_down_still_names_its_job(tmp_path: Path) -> None:
    """Its series ended with its agent; the page is that of an agent that lives, or where none does of one's own."""
    message = {
        "summary": "The agent of node-17:9477 does not answer",
        "description": "The node, its network or the agent is down. Nothing is known about its GPUs.",
        "node": "node-17",
        "job": "4242",
        "cost": "1 GPUs of job 4242 are affected",
        "next_step": "opsd runbook show agent_silent",
    }
    down = {f'up{{{NODE},job="opsd"}}': "1x20 0x50", INFO.format(INSTANCE, 3, 0): "1x20 stale"}
    other = {'up{instance="node-18:9477",job="opsd"}': "1x70"}
    labels = {"instance": INSTANCE, "job": "opsd", "severity": "critical"}
    tests = [
        message_group("AgentSilent", series, labels, {**message, "runbook_url": f"http://{host}/runbooks/agent_silent"})
        for series, host in (({**down, **other}, "node-18:9477"), (down, "localhost:9477"))
    ]
    assert promtool(tmp_path, tests) == ""


ALERTMANAGER = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="amtool (Debian package prometheus-alertmanager) is not installed"
)


# What Alertmanager makes of the alerts: who is told, and in which words.


SHIPPED = Path(__file__).parents[2] / "deploy" / "alertmanager"

CONFIG = SHIPPED / "alertmanager.yml"


def amtool(*arguments: str) -> str:
    done = subprocess.run(["amtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@ALERTMANAGER
def test_the_configuration_is_good() -> None:
    """With its templates."""
    assert "SUCCESS" in amtool("check-config", str(CONFIG))


@ALERTMANAGER
@pytest.mark.parametrize(
    ("severity", "receivers"),
    [
        ("critical", {"webhook", "pagerduty", "slack"}),
        ("warning", {"webhook", "slack"}),
        ("info", {"webhook", "slack"}),
    ],
)
def test_only_what_costs_training_now_wakes_somebody(severity: str, receivers: set[str]) -> None:
    """The webhook gets everything, the pager what is critical."""
    routed = amtool("config", "routes", "test", f"--config.file={CONFIG}", f"severity={severity}", "alertname=X")
    assert set(routed.strip().split(",")) == receivers


@ALERTMANAGER
def test_inhibition_names_only_alerts_that_exist() -> None:
    """A rule about an alert that was renamed would silence nothing, without anybody noticing."""
    known = {alert.name for alert in alerts()}
    for rule in yaml.safe_load(CONFIG.read_text())["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            if names := re.match(r'alertname!?=~?"(.*)"', matcher):
                assert set(names[1].split("|")) <= known, matcher


def labels_of(alert: Rule) -> set[str]:
    """Labels that tell where it is."""
    if alert.shared:
        return {"cluster", "run"} if "by (cluster, run)" in alert.expr or "run:" in alert.expr else {"cluster"}
    return {"cluster", "instance"} | ({"gpu"} if "gpu" in alert.annotations else set())


@ALERTMANAGER
def test_inhibition_compares_only_labels_that_the_alerts_have() -> None:
    """A label that one of two alerts lacks never equals that of the other, and the rule would silence nothing.

    What is told once for the cluster beside the nodes is not meant.
    """
    labels = {alert.name: labels_of(alert) for alert in sorted(alerts(), key=lambda alert: not alert.shared)}
    for rule in yaml.safe_load(CONFIG.read_text())["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            if names := re.match(r'alertname=~?"(.*)"', matcher):
                for name in names[1].split("|"):
                    assert set(rule["equal"]) <= labels[name], (name, rule)


@ALERTMANAGER
def test_a_message_says_what_where_whose_and_what_next(tmp_path: Path) -> None:
    """As it appears in Slack, for a GPU that is throttled."""
    alert = {
        "status": "firing",
        "labels": {"alertname": "GpuThrottle", "severity": "critical", "gpu": "3", "instance": "node-17:9477"},
        "annotations": {
            "summary": "GPU 3 of node-17:9477 is throttled 40% of the time",
            "description": "Heat holds its clocks back.",
            "node": "node-17",
            "job": "4242",
            "cost": "512 GPUs of job 4242 are affected; this kind of incident costs the node 480.0 GPU-hours per hour",
            "next_step": "on node-17: opsd incidents; opsd runbook show gpu_throttle",
            "runbook_url": "http://node-17:9477/runbooks/gpu_throttle",
        },
    }
    data = tmp_path / "data.json"
    data.write_text(
        json.dumps({"status": "firing", "alerts": [alert, alert], "commonLabels": {"severity": "critical"}})
    )

    def render(name: str) -> str:
        text = f'{{{{ template "{name}" . }}}}'
        glob = f"--template.glob={SHIPPED}/templates/*.tmpl"
        return amtool("template", "render", glob, f"--template.data={data}", f"--template.text={text}")

    assert render("opsd.title") == "[CRITICAL] GPU 3 of node-17:9477 is throttled 40% of the time (one of 2)"
    text = render("opsd.text")
    assert "Node: node-17  GPU: 3  Job: 4242\nCost: 512 GPUs of job 4242 are affected; this kind" in text
    assert "Next: on node-17: opsd incidents; opsd runbook show gpu_throttle\nPage: http://node-17:9477/" in text
    assert render("opsd.color") == "danger"
