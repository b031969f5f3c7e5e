"""`opsd preflight --alerts` with the shipped rules and routes in real Prometheus and Alertmanager."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

from opsd.preflight.base import Context
from opsd.preflight.checks import run_alerts
from opsd.preflight.judge import judge
from opsd.settings.sections import PreflightSettings
from opsd.stack.world import Stack, StackError, eventually, get

pytestmark = pytest.mark.long


def test_each_alert_is_received_once_and_then_over(tmp_path: Path) -> None:
    """All rules are known, every receiver is told, the inbox has each alert once; afterwards none is left firing."""
    try:
        stack = Stack(tmp_path)
    except StackError as error:
        pytest.skip(str(error))
    with stack:
        stack.inbox.close()  # its address becomes that of the check
        address = stack.inbox.url.removeprefix("http://")
        context = Context(
            "n1", "standard", 60.0, fire_alerts=True,
            settings=PreflightSettings(
                alertmanager=stack.alertmanager, prometheus=stack.prometheus, alert_inbox=address
            ),
        )  # fmt: skip
        outcome = run_alerts.run(context, lambda share, subject: None)
        assert judge(run_alerts.CHECK, outcome, 0.0).verdict == "pass", outcome.findings
        assert outcome.facts["GpuThrottle"] == "webhook, pagerduty, slack"
        assert len(outcome.facts) == outcome.measurements[0].value > 50
        assert eventually(lambda: not get(f"{stack.alertmanager}/api/v2/alerts?filter=test%3D%22true%22"), 20.0)
