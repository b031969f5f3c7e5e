"""Metrics whose past the agent does not keep, as they are exported only."""

from __future__ import annotations

import ast
from pathlib import Path

from opsd import runbooks
from opsd.agent.window import Window
from opsd.collectors.base import Metric, Reading, Sample
from opsd.commands.metrics import catalogue

EXPORTED = Metric("opsd_exported", "x", kept=False)
KEPT = Metric("opsd_kept", "x")


def test_the_window_has_no_series_of_them() -> None:
    window = Window("n1")
    window.begin(1.0, 1.0)
    window.add("source", Reading((Sample(EXPORTED, 1.0), Sample(KEPT, 2.0), Sample(EXPORTED, 3.0))))
    assert [series.last for series in window.select("opsd_kept")] == [2.0]
    assert not window.select("opsd_exported")
    assert len(window) == 1


def test_no_runbook_asks_for_them() -> None:
    """A name in a runbook is the name of a metric that is kept."""
    folder = Path(runbooks.__path__[0])
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    words = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    exported = {metric.name for _, metric in catalogue() if not metric.kept}
    assert "opsd_xid_total" in exported
    assert not exported & words
