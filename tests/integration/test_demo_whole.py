"""The demo as a user runs it: faults are found, attributed and repaired, and losses are as without faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_passes(tmp_path: Path) -> None:
    """With simulated GPUs where there are no real ones."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "opsd", "demo", "--dir", str(tmp_path / "demo"), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert json.loads(report.read_text())
