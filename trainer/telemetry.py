"""What the trainer says of its steps: metrics.jsonl, the terminal, trackers and its page.

``metrics.jsonl`` in the run folder: one line per completed step, written by the first rank.

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
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from opsd.client import Reporter
from opsd.events import DataMixture
from opsd.jsonl import METRICS, Appender
from opsd.threads import Background, Work, run_now
from opsd.trainer.config import Config
from opsd.trainer.counts import flops_per_token
from opsd.trainer.data.mixture import Mixture
from opsd.trainer.data_settings import Shape
from opsd.trainer.evaluations import queue_of, saved
from opsd.trainer.experts import LOADS
from opsd.trainer.tracking import Tracking
from opsd.trainer.world import World
from opsd.words import count, duration, with_remedy


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


# What a run reports besides its rank pages: metrics, trackers, evaluations, the data it has read.
#
# The first rank prints a line every ``run.log_every`` steps. Its rates are those of the steps since the line before.
# With a z-loss it also has the cross-entropy without it::
#
#     step 120/250  loss 4.312  grad norm 0.84  lr 3.00e-03  12,345 tokens/s  MFU 41.2 %  memory 31.2 of 79.1 GiB …


class Telemetry:
    """Active on the first rank; on the others the methods do nothing."""

    def __init__(self, config: Config, mixture: Mixture, world: World, reporter: Reporter) -> None:
        reporter.planned(config.run.steps)
        self._config, self._mixture, self._reporter = config, mixture, reporter
        self._shape: Shape | None = None
        self._first, self._mixture_told = world.rank == 0, -1
        if not self._first:
            return
        folder = Path(config.run.folder)
        try:
            config.store(folder)
        except OSError as error:  # evaluations and the next start want it, the training does not
            print(f"opsd: {with_remedy(error)}", file=sys.stderr)
        self._background = Background()
        background = self._background.run
        self._metrics = MetricsLog(folder / METRICS, config, world.size, background)
        self._loads = LoadsLog(folder / EXPERTS, config, background)
        self._lines = StepLines(config.run.log_every, config.run.steps, partial(peak_memory, world.device))
        self._evaluations = queue_of(config, folder, reporter, background) if config.evaluation.wanted else None
        self._tracking = Tracking(config, folder, reporter)

    def begin(self, shape: Shape) -> None:
        """The steps from now on have ``shape``, and cost as much; told on every rank's page."""
        if shape == self._shape:
            return
        self._shape = shape
        flops = flops_per_token(self._config.model, shape.sequence)
        self._reporter.model(flops, self._config.metrics.peak_flops)
        if self._first:
            self._metrics.begin(shape, flops)

    def write(self, *, step: int, **values: float | int) -> None:
        """Add the line of ``step`` to the metrics, and print one if it is time."""
        if self._first:
            self._lines.note(self._metrics.write(step=step, **values))

    def add_routed(self, step: int, measured: torch.Tensor) -> None:
        """Add what the routers of all ranks ``measured`` in ``step``, see ``Routing``, to the loads of experts."""
        if self._first and len(measured):
            self._loads.add(step, measured)

    def report_mixture(self, step: int, sample: int) -> None:
        """Report how much of each source the first ``sample`` samples used, at the end of ``step``, once."""
        if self._first and step != self._mixture_told:
            self._mixture_told = step
            cuts = self._config.data.cuts()
            tokens, epochs = dict.fromkeys(self._config.data.sources, 0), dict.fromkeys(self._config.data.sources, 0.0)
            for name, samples in self._mixture.drawn(sample).items():
                tokens[cuts[name].source] += samples * cuts[name].length
                epochs[cuts[name].source] += samples / self._mixture.sizes[name]
            self._reporter.event("data_mixture", **DataMixture(step=step, tokens=tokens, epochs=epochs))

    def poll(self, committed: Iterable[int]) -> None:
        """Start evaluations of the checkpoints of the steps ``committed``, and report finished ones; never waits."""
        if self._first and self._evaluations is not None:
            self._evaluations.add(saved(Path(self._config.run.folder), committed))
            self._evaluations.poll(time.monotonic())

    def close(self, committed: Iterable[int]) -> None:
        """Wait for the last evaluations, unless the run is being stopped, and pass on the last numbers."""
        if not self._first:
            return
        self._loads.write()
        with self._reporter.phase("checkpoint"):
            storage_answers = self._background.finish()
        if self._evaluations is not None and storage_answers:
            with self._reporter.phase("evaluation"):
                self._evaluations.add(saved(Path(self._config.run.folder), committed))
                self._evaluations.close()
        self._tracking.close()


EXPERTS: Final = "experts.jsonl"


class LoadsLog:
    """Sums up loads of experts, and writes them from time to time. The file exists from the first line on.

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

    Prometheus has only the fullest expert of all layers: a series for each would be thousands in a run.
    """

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
