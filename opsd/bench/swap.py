"""``opsd bench swap``: how long a run stands still when a node of it goes, on a real Slurm cluster in namespaces."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from opsd.checkout import ROOT
from opsd.scenarios.model import ScenarioError

TRIALS = 10


def run() -> dict[str, Any]:
    """The scenarios by name with ``p50_s``, ``p99_s``, ``lost_steps_max``, ``trials`` and ``failed``.

    Raises ScenarioError where there can be no cluster.
    """
    if not (ROOT / "tests/integration/slurm").is_dir():
        raise ScenarioError("the test cluster is part of the checkout, and this opsd is installed without it")
    if reason := import_module("tests.integration.slurm.cluster").missing():
        raise ScenarioError(f"no Slurm cluster can be made: {reason}")
    swaps = import_module("tests.integration.slurm.swaps")
    return {"scenarios": swaps.run(TRIALS, lambda text: print(text, flush=True)), "peers": {}}
