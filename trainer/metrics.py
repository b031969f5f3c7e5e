"""``metrics.jsonl`` in the run folder: one line per completed step, written by the first rank.

==============  ==========================================================================================
key            meaning
==============  ==========================================================================================
t               wall-clock second of the end of the step
generation      which start of the run wrote the line; a step that was computed again has a line of each
step            absolute, from 1
tokens          trained on so far, this step included
loss            cross-entropy, mean over the global batch, nats per token, every digit of the float64
z_loss          the regulariser that is added to it, ``optimizer.z_loss`` times the mean of log(Z)^2
balance_loss    of the routers of all layers, ``optimizer.balance_loss`` times how uneven they are; this and the next
                three only with experts
router_z_loss   of the routers of all layers, ``optimizer.router_z_loss`` times the mean of log(Z)^2
router_entropy  of the weights that a token's experts get, mean, as a share of the greatest possible; the lowest of all
                layers: 0 is a router that has decided, 1 one that has not
router_load     tokens of the most loaded expert over the mean of its layer; the greatest of all layers, from 1
grad_norm       global, before clipping
lr              learning rate of the step
step_s          seconds since the line before, of which ``data_s`` waiting for data and ``checkpoint_s`` for the
                staging of that step's state
tokens_per_s    of all ranks together
mfu             model FLOP/s over ``metrics.peak_flops`` x ranks; null if the peak is not known
==============  ==========================================================================================
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opsd.jsonl import Appender
from opsd.threads import Work, run_now
from opsd.trainer.config import Config
from opsd.trainer.data_settings import Shape


class MetricsLog:
    """Appends the line of each step to a file."""

    def __init__(
        self, path: Path, config: Config, ranks: int, background: Callable[[Work], None] = run_now
    ) -> None:  # fmt: skip
        """``background`` runs work that may have to wait for storage."""
        self._file = Appender(path, background)
        self._tokens, self._flops = 0, 0.0
        self._peak_flops = config.metrics.peak_flops * ranks
        self._generation = int(os.environ.get("OPSD_GENERATION", "0"))
        self._step_began = time.perf_counter()

    def begin(self, shape: Shape, flops: float) -> None:
        """The steps from now on have ``shape``; a token costs ``flops``, forward and backward."""
        self._tokens, self._flops = shape.batch * shape.sequence, flops

    def write(self, *, step: int, **values: float | int) -> dict[str, Any]:
        """Append the line of the ``step`` that ends now; ``values`` are the keys that the caller provides.

        Returns the line, with None in place of what is not finite.
        """
        now = time.perf_counter()
        step_s, self._step_began = now - self._step_began, now
        line = {
            "t": time.time(),
            "generation": self._generation,
            "step": step,
            **values,
            "step_s": step_s,
            "tokens_per_s": self._tokens / step_s,
            "mfu": self._flops * self._tokens / step_s / self._peak_flops if self._peak_flops else None,
        }
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._file.append(finite)
        return finite
