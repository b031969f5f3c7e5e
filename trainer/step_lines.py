"""The line that the first rank prints every ``run.log_every`` steps.

``step 120/250  loss 4.312  grad norm 0.84  lr 3.00e-03  12,345 tokens/s  MFU 41.2 %  memory 31.2 of 79.1 GiB  ETA 1 min
12 s``; with a z-loss also the cross-entropy without it. Rates are those of the steps since the line before.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opsd.words import count, duration

_BOLD, _DIM, _RED, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
_GIB = float(1 << 30)
_STEADY = 3
"""Steps of a start that are left out of the ETA: compilation, first collectives."""


class StepLines:
    """Prints with ``say`` what the lines of the metrics tell; coloured if ``color``. ``every`` 0 prints nothing."""

    def __init__(
        self,
        every: int,
        steps: int,
        memory: Callable[[], str],
        *,
        say: Callable[[str], None] = lambda text: print(text, flush=True),
        color: bool | None = None,
    ) -> None:
        self._every, self._steps, self._memory, self._say = every, steps, memory, say
        self._color = _takes_color() if color is None else color
        self._seen = self._tokens = 0
        self._seconds = 0.0
        self._all_seconds = 0.0

    def note(self, line: Mapping[str, Any]) -> None:
        """Take in the line of a step, and print one if it is time."""
        if not self._every:
            return
        self._seen += 1
        self._seconds += line["step_s"]
        self._tokens += round(line["tokens_per_s"] * line["step_s"])
        if self._seen > _STEADY:
            self._all_seconds += line["step_s"]
        step = line["step"]
        if step % self._every == 0 or step == self._steps or self._seen == 1:
            self._say(self._text(line))
            self._seconds, self._tokens = 0.0, 0

    def _text(self, line: Mapping[str, Any]) -> str:
        """A value that is not finite has become None in the line."""
        cross_entropy, z_loss = line["loss"], line.get("z_loss")
        loss = None if cross_entropy is None or z_loss is None else cross_entropy + z_loss
        parts = [
            self._styled(_BOLD, f"step {line['step']:>{len(str(self._steps))}}/{self._steps}"),
            f"loss {self._number(loss, '.4f')}",
            *([f"cross-entropy {self._number(cross_entropy, '.4f')}"] if z_loss else []),
            f"grad norm {self._number(line['grad_norm'], '.3g')}",
            f"lr {line['lr']:.2e}",
            f"{count(self._tokens / self._seconds if self._seconds else 0.0)} tokens/s",
            *([f"MFU {line['mfu']:.1%}"] if line.get("mfu") is not None else []),
            f"memory {self._memory()}",
            self._styled(_DIM, self._left(line["step"])),
        ]
        return "  ".join(part for part in parts if part)

    def _left(self, step: int) -> str:
        """The time that is left, at the mean speed of this start."""
        if self._seen <= _STEADY or step >= self._steps:
            return ""
        return f"ETA {duration((self._steps - step) * self._all_seconds / (self._seen - _STEADY))}"

    def _number(self, value: float | None, form: str) -> str:
        finite = value is not None and math.isfinite(value)
        return format(value, form) if finite else self._styled(_RED, "not finite")

    def _styled(self, style: str, text: str) -> str:
        return f"{style}{text}{_PLAIN}" if self._color and text else text


def _takes_color() -> bool:
    """Under the launcher stdout is no terminal; OPSD_COLOR says that one shows it."""
    return (sys.stdout.isatty() or bool(os.environ.get("OPSD_COLOR"))) and not os.environ.get("NO_COLOR")


def peak_memory(device: torch.device) -> str:
    """The most memory that this rank has had: of its GPU, with the size of that, or of the process on a CPU."""
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.max_memory_reserved(device) / _GIB:.1f} of {size / _GIB:.1f} GiB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20):.1f} GiB"
