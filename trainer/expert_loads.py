"""``experts.jsonl`` in the run folder: how many tokens each expert has had, a line per ``metrics.experts_every`` steps.

============  ========================================================================================
key           meaning
============  ========================================================================================
t             wall-clock second of the end of the last of these steps
generation    which start of the run wrote the line
step          the last of these steps
steps         their number; fewer in the first and the last line of a start
first_layer   number of the first layer with experts, from 0
loads         tokens sent to each expert in these steps, a list of all its experts for each layer
============  ========================================================================================

Prometheus has only the fullest expert of all layers: a series for each expert and layer would be thousands in a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from opsd.trainer.background import Work, run_now
from opsd.trainer.config import Config
from opsd.trainer.experts import LOADS
from opsd.trainer.jsonl import Appender

EXPERTS: Final = "experts.jsonl"


class LoadsLog:
    """Sums up loads, and writes them from time to time. The file exists from the first line on."""

    def __init__(self, path: Path, config: Config, background: Callable[[Work], None] = run_now) -> None:
        """``background`` runs work that may have to wait for storage."""
        self._path, self._background = path, background
        self._every, self._first_layer = config.metrics.experts_every, config.model.dense_layers
        self._generation = int(os.environ.get("OPSD_GENERATION", "0"))
        self._file: Appender | None = None
        self._step = self._steps = 0
        self._sum = torch.zeros(0)

    def add(self, step: int, measured: torch.Tensor) -> None:
        """Add what the routers ``measured`` in ``step``, in the form of ``Routing.measured``, on the CPU."""
        loads = measured[:, LOADS:]
        self._sum = self._sum + loads if self._steps else loads
        self._step, self._steps = step, self._steps + 1
        if step % self._every == 0:
            self.write()

    def write(self) -> None:
        """Write the line of the steps since the last one, if there are any."""
        if not self._steps:
            return
        self._file = self._file or Appender(self._path, self._background)
        self._file.append({
            "t": time.time(), "generation": self._generation, "step": self._step, "steps": self._steps,
            "first_layer": self._first_layer, "loads": self._sum.round().long().tolist(),
        })  # fmt: skip
        self._steps = 0
