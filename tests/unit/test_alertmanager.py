"""What Alertmanager makes of the alerts: who is told, and in which words."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("yaml")

import yaml

from opsd.dashboards.alerts import Rule, alerts

FOLDER = Path(__file__).parents[2] / "deploy" / "alertmanager"
CONFIG = FOLDER / "alertmanager.yml"

pytestmark = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="amtool (Debian package prometheus-alertmanager) is not installed"
)


def amtool(*arguments: str) -> str:
    done = subprocess.run(["amtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_configuration_is_good() -> None:
    """With its templates."""
    assert "SUCCESS" in amtool("check-config", str(CONFIG))


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
        glob = f"--template.glob={FOLDER}/templates/*.tmpl"
        return amtool("template", "render", glob, f"--template.data={data}", f"--template.text={text}")

    assert render("opsd.title") == "[CRITICAL] GPU 3 of node-17:9477 is throttled 40% of the time (one of 2)"
    text = render("opsd.text")
    assert "Node: node-17  GPU: 3  Job: 4242\nCost: 512 GPUs of job 4242 are affected; this kind" in text
    assert "Next: on node-17: opsd incidents; opsd runbook show gpu_throttle\nPage: http://node-17:9477/" in text
    assert render("opsd.color") == "danger"
