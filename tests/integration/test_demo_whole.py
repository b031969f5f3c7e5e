"""The demo as a user runs it, and what its agent took in meanwhile, changed in what must not matter."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from opsd.agent.journal import Journal
from tests.fakes.recorded import CHANGES, compared, incidents_of, play, read
from tests.fakes.tree import ROOT

SEEDS = 6

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def test_the_demo_passes_and_its_stream_is_judged_alike_however_it_comes(tmp_path: Path) -> None:
    """With simulated GPUs where there are no real ones. Each change of ``CHANGES`` is made at random instants."""
    report, stream = tmp_path / "report.json", tmp_path / "stream"
    demo = ["opsd", "demo", "--dir", str(tmp_path / "demo"), "--json", str(report)]
    command = [sys.executable, "-m", "tests.fakes.recorded", str(stream), *demo]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert json.loads(report.read_text())

    ticks = read(stream)
    plain = play(ticks)
    journal = Journal(next((tmp_path / "demo").glob("*/agent-disturbed")), print)
    content = journal.open()
    journal.close()
    assert incidents_of(plain.incidents.values()) == incidents_of([*content.current, *content.ended])
    found = {
        (name, seed): different
        for name, change in CHANGES.items()
        for seed in range(SEEDS)
        if (different := compared(name, plain, ticks, change(ticks, random.Random(seed))))
    }
    assert found == {}
