"""``opsd bench swap``: how long a run stops when it loses a node, on a real Slurm cluster in namespaces."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from opsd.scenarios.model import ScenarioError

ROOT = Path(__file__).parents[2]

TRIALS = 10


def on_the_cluster(name: str) -> ModuleType:
    """The module ``name`` of the tests, which are not part of the installed package.

    Raises ScenarioError if no cluster can be started.
    """
    if not (ROOT / "tests/integration/slurm").is_dir():
        raise ScenarioError("the test cluster is part of the checkout, and this opsd is installed without it")
    if reason := import_module("tests.integration.slurm.cluster").missing():
        raise ScenarioError(f"no Slurm cluster can be made: {reason}")
    return import_module(f"tests.integration.slurm.{name}")


def run(trials: int = TRIALS, scenario: tuple[str, ...] = ()) -> dict[str, Any]:
    """The scenarios by name with ``p50_s``, ``p99_s``, ``lost_steps_max``, ``trials`` and ``failed``.

    Raises ScenarioError where there can be no cluster, or no such ``scenario``.
    """
    swaps = on_the_cluster("swaps")
    if unknown := set(scenario) - set(swaps.NAMES):
        raise ScenarioError(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(swaps.NAMES)}")
    found: dict[str, Any] = swaps.run(trials, lambda text: print(text, flush=True), scenario or swaps.NAMES)
    return found
