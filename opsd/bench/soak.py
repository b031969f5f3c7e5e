"""The agent for an hour at full rate under every attack of ``tests/adversary``: memory, scrapes, and what is lost.

Users train in three runs on eight GPUs, others attack, faults of the hardware come on a plan. Memory must be flat,
every scrape answered within a second, and every planted fault in the journal and told exactly once.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from opsd.bench import BenchError

ROOT = Path(__file__).parents[2]


def run(hours: float = 1.0) -> dict[str, Any]:
    """Measurements, and the ``verdict``: "good", or what was wrong. Raises BenchError where it cannot be run."""
    if not (ROOT / "tests/adversary").is_dir():
        raise BenchError("the attacks are in the tests, which this installation does not have: run it in a checkout")
    if os.geteuid() != 0:
        raise BenchError("the soak needs root: its attackers are other users of the node")
    results: dict[str, Any] = import_module("tests.adversary.soak.play").play(hours * 3600)
    return results
