"""Each alert fires when it should and only then: promtool runs the rules on series of ``tests.fakes.alert_cases``."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("yaml")

import yaml

from opsd.dashboards.alerts import FOLDER, Rule, alerts
from tests.fakes.alert_cases import BURNS, CASES, GPU, NODE, SHARED, Case, Series

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)


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
