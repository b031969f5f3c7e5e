"""Material from outside this project, by which detection is judged. One module for each set, registered here.

A set is a small folder under ``tests/outside`` with its source and licence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from opsd.bench.outside import flight_recorder, kernel_lines, step_times
from opsd.scenarios.player import ScenarioResult

FOLDER = Path(__file__).parents[3] / "tests" / "outside"

SETS: Mapping[str, Callable[[Path], Iterator[ScenarioResult]]] = {
    "flight_recorder": flight_recorder.results,
    "kernel_lines": kernel_lines.results,
    "step_times": step_times.results,
}
"""The results of the cases of each set, from the folder of all sets."""
