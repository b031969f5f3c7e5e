"""What ``experts.jsonl`` of a run says about its mixture of experts: the newest line, by layer and expert."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from opsd.ledger.records import open_run_file

FILE: Final = "experts.jsonl"
STARVED: Final = 0.1
"""An expert with less than this share of the mean of its layer hardly learns."""
_END_BYTES: Final = 4 << 20
"""Of the file, which grows for months, its end is read. A line has some ten bytes for each layer and expert."""

_MOST: Final = 10**18


@dataclass(frozen=True, slots=True)
class LayerLoads:
    """The tokens that each expert of a layer has had."""

    layer: int
    loads: Sequence[int]

    @property
    def relative(self) -> list[float]:
        """The loads over their mean."""
        mean = sum(self.loads) / len(self.loads)
        return [load / mean if mean else 0.0 for load in self.loads]

    @property
    def fullest(self) -> int:
        """The number of the expert with most tokens."""
        return max(range(len(self.loads)), key=self.loads.__getitem__)

    @property
    def emptiest(self) -> int:
        """The number of the expert with fewest tokens."""
        return min(range(len(self.loads)), key=self.loads.__getitem__)

    @property
    def starved(self) -> int:
        """Number of experts below ``STARVED``."""
        return sum(load < STARVED for load in self.relative)


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """The loads of all layers in the ``steps`` up to ``step``."""

    step: int
    steps: int
    layers: Sequence[LayerLoads]

    @property
    def span(self) -> str:
        """These steps in words."""
        return f"step {self.step}" if self.steps == 1 else f"steps {self.step - self.steps + 1} to {self.step}"

    @property
    def sentence(self) -> str:
        """The fullest expert, and how many are starved."""
        worst = max(self.layers, key=lambda layer: max(layer.relative))
        experts = sum(len(layer.loads) for layer in self.layers)
        starved = sum(layer.starved for layer in self.layers)
        return (
            f"fullest is expert {worst.fullest} of layer {worst.layer}, {max(worst.relative):.1f} times the mean; "
            f"{starved:,} of {experts:,} have less than {STARVED:.0%} of it ({self.span})"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"step": self.step, "steps": self.steps, "loads": {one.layer: list(one.loads) for one in self.layers}}


def read_loads(folder: Path) -> ExpertLoads | None:
    """The newest loads of the run in ``folder``; None without any that can be read."""
    with suppress(OSError), open(folder / FILE, "rb", opener=open_run_file) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        for line in reversed((file.read() or b"").splitlines()):  # None: a file of /proc that waits
            with suppress(ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
                return _parsed(json.loads(line))
    return None


def _parsed(line: dict[str, Any]) -> ExpertLoads:
    first = int(line["first_layer"])
    layers = [LayerLoads(first + number, [int(n) for n in loads]) for number, loads in enumerate(line["loads"])]
    if not layers or not all(layer.loads and 0 <= min(layer.loads) <= max(layer.loads) < _MOST for layer in layers):
        raise ValueError("no loads")
    return ExpertLoads(int(line["step"]), int(line["steps"]), layers)
