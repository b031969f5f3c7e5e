"""The training loop.

All heavy imports of a run are at the top of a module that this one imports: an interpreter that has imported
``opsd.trainer.train`` starts a rank without delay. ``torch._dynamo`` is among them because otherwise optimisers and
FSDP import it in their first step.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from opsd.client import Reporter
from opsd.events import UpdateSkipped
from opsd.trainer.accumulate import accumulator, gpu_clock, micro_batches
from opsd.trainer.checkpoint import training_state
from opsd.trainer.config import Config, ConfigError
from opsd.trainer.data.loader import Loader
from opsd.trainer.data.sources import Source, open_sources, sizes
from opsd.trainer.data_settings import Shape
from opsd.trainer.evaluations import demand_sets
from opsd.trainer.experts import routing_figures
from opsd.trainer.optimizer import Optimizer
from opsd.trainer.parallel import build, demand_device, demand_libraries
from opsd.trainer.replay import Repeatable, Replay
from opsd.trainer.restore import restore
from opsd.trainer.saving import Saving, checkpoint_folder, finish_uploads
from opsd.trainer.settings import ScheduleSettings
from opsd.trainer.telemetry import Telemetry
from opsd.trainer.tracking import demand_installed
from opsd.trainer.world import World, gpu_here, join

COLLECT_EVERY = 50
"""Steps between two collections of garbage."""


def rate_factor(step: int, schedule: ScheduleSettings) -> float:
    """Factor of the peak learning rate at ``step``, counted from 1.

    All phases are in absolute steps, so that a run is extended by moving its decay. wsd is warm-up, stable, decay
    (arXiv 2404.06395), its 1-sqrt from arXiv 2405.18392. cosine is that of SGDR without restarts (arXiv 1608.03983).
    """
    if step < schedule.warmup:
        return step / schedule.warmup
    if schedule.kind == "multi-step":
        return schedule.gamma ** sum(step >= milestone for milestone in schedule.milestones)
    start = schedule.decay_start if schedule.kind == "wsd" else schedule.warmup
    left = min(1.0, max(0.0, (schedule.decay_end - step) / (schedule.decay_end - start)))
    if schedule.kind == "cosine" or schedule.decay == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    elif schedule.decay == "1-sqrt":
        left = 1 - math.sqrt(1 - left)
    return schedule.floor + (1 - schedule.floor) * left


class Collections:
    """While it is entered, Python's garbage is collected by ``after`` alone, and not what was there before.

    Otherwise each rank stops at a moment of its own, and all wait for the slowest in the next collective operation.
    """

    def __enter__(self) -> Collections:
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()
        gc.unfreeze()

    def after(self, step: int) -> None:
        """Collect what has become garbage, but for old objects, if it is time after ``step``, an absolute number."""
        if step % COLLECT_EVERY == 0:
            gc.collect(1)


class TrainingError(Exception):
    """The training cannot go on; the message is one sentence."""


def train(config: Config, *, fresh: bool = False) -> bool:
    """Train to ``config.run.steps``, or to the step at which a stop is requested.

    Returns False if the last state could not be saved. Raises ConfigError, DataError or RestoreError for errors that
    the user can fix, and TrainingError after too many non-finite gradients in a row.
    """
    reporter = Reporter.from_env()
    # Refusals that a rank can decide alone come first. Once the ranks have met, the first to end breaks the others'
    # collectives.
    demand_installed(config.tracking)
    demand_libraries(config.parallel)
    demand_device(config, gpu_here(config.run))
    if os.environ.get("RANK", "0") == "0":
        demand_sets(config.evaluation)
    counts = micro_batches(config, int(os.environ.get("WORLD_SIZE", "1")))
    sources = open_corpora(config)
    world = join(config.run, config.parallel)
    reporter.place(**world.place)
    training = Training(config, counts, sources, world, reporter)
    root = checkpoint_folder(config, world)
    training.restore(root, fresh=fresh)
    saving = Saving.of(config, training.state, training.model, world, reporter, training.step)
    telemetry = Telemetry(config, training.mixture, world, reporter)
    telemetry.report_mixture(training.step, training.sample)
    if training.step >= config.run.steps and world.rank == 0:
        print(f"all {config.run.steps:,} steps are done; a larger run.steps goes on", flush=True)
        finish_uploads(root, config.checkpoint.remote)
    stop = False
    with Collections() as garbage:
        while training.step < config.run.steps and not stop:
            stop = training.advance(saving, telemetry)
            garbage.after(training.step)
    training.loader.close()
    telemetry.report_mixture(training.step, training.sample)
    with reporter.phase("checkpoint"):
        saved = saving.finish(training.step, training.sample, training.digest)
    telemetry.close(saving.take_committed())
    reporter.close()
    dist.destroy_process_group()
    return saved


def open_corpora(config: Config) -> dict[str, Source]:
    """The run's corpora; each local rank has compared its part of the files with the indexes. Raises DataError."""
    part, parts = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return open_sources(config.data, config.model.vocab, part=part, parts=parts)


class Training:
    """What a rank trains with, and its position: after ``step`` steps, and ``sample`` samples of all ranks."""

    def __init__(
        self,
        config: Config,
        counts: Mapping[Shape, int],
        sources: Mapping[str, Source],
        world: World,
        reporter: Reporter,
    ) -> None:
        self._config, self._counts, self._world, self._reporter = config, counts, world, reporter
        self.loader = Loader(config, sources, world, reporter)
        self.model = build(config, world)
        alone = world.whole and config.parallel.pp == config.parallel.cp == 1
        self._clock = gpu_clock(world.device) if alone else None
        """Not of a sharded model, in whose forward pass the GPU also waits for other ranks."""
        batches = Repeatable(self.loader)
        self._gradients = accumulator(self.model, batches, config, world, reporter, self._clock)
        self._replay = Replay(self.model, batches, self._gradients, config, world, reporter)
        self._optimizer = Optimizer(self.model, config.optimizer, world.peers)
        self.state = training_state(self.model, self._optimizer, world)
        self.mixture = config.data.mix(sizes(sources, config.data), config.run.seed)
        shards = {name: sources[cut.source].index.digest for name, cut in config.data.cuts().items()}
        self.digest = partial(config.digest, self.mixture, shards)
        """Identifies model and data after a number of samples."""
        self.step = self.sample = 0
        self._skipped = 0

    def restore(self, root: Path, *, fresh: bool) -> None:
        """Resume from the newest valid checkpoint; without one, start from the initial weights."""
        config = self._config
        manifest = restore(
            root, self.state, self._world, self.digest, self._reporter, remote=config.checkpoint.remote, fresh=fresh,
            changes=partial(config.changes, root.parent),
        )  # fmt: skip
        if manifest is not None:
            self.step, self.sample = manifest.step, manifest.sample
            planned = config.data.position(self.step + 1)
            if config.data.lengthens and self.sample != planned:
                raise ConfigError(
                    f"the run has {self.sample} samples after step {self.step} and would have {planned} with its "
                    "settings, so stages would begin at other steps; give the batches so far in data.batch_warmup"
                )
        elif config.run.initial:
            from opsd.trainer.hf.weights import fill

            fill(self.model, Path(config.run.initial))
        self._optimizer.set_updates(self.state["updates"].local.item())
        self.loader.begin(self.sample)

    def advance(self, saving: Saving, telemetry: Telemetry) -> bool:
        """Do one step; whether a stop has been requested. Raises TrainingError."""
        config, world, reporter = self._config, self._world, self._reporter
        self.step += 1
        shape = config.data.shape_at(self.step)
        self.model.settings = config.model_with(shape)
        telemetry.begin(shape)
        self.sample += shape.batch
        rate = config.optimizer.lr * rate_factor(self.step, config.schedule)
        terms = self._gradients(self._counts[shape])
        with reporter.phase("collective"):
            telemetry.poll(saving.take_committed())
            # One all-reduce carries all that the ranks must agree on.
            loss_sum, z_loss_sum, square, stops, busy, failed, due, *measured = world.sum((
                *terms, self._optimizer.take_gradients(), reporter.stop_requested, *saving.votes(self.step),
                self.model.routing.measured,
            ))  # fmt: skip
        # Every rank of a stage has contributed what it has computed of its part of the batch.
        parts = world.size // config.parallel.pp
        routed = self.model.routing.of_all(measured, parts)
        loss, z_loss, norm = loss_sum / parts, z_loss_sum / parts, math.sqrt(square)
        with reporter.phase("optimizer"):
            self._update(rate, norm, routed)
        self._replay(self.step)
        # The line comes first: while storage answers, no start goes on from a step that has none.
        figures = routing_figures(routed)
        if figures:
            experts = config.model.experts / config.model.experts_per_token
            reporter.router(load=figures["router_load"], limit=experts, entropy=figures["router_entropy"])
        telemetry.add_routed(self.step, routed)
        telemetry.write(
            step=self.step, tokens=config.data.tokens(self.sample), loss=loss, z_loss=z_loss,
            **figures, grad_norm=norm, lr=rate,
            data_s=self.loader.take_wait(), checkpoint_s=saving.take_stall(),
        )  # fmt: skip
        if saving.save_if_due((busy, failed, due), self.step, self.sample, self.digest):
            telemetry.report_mixture(self.step, self.sample)
        reporter.step(
            tokens=shape.batch * shape.sequence // world.size, loss=loss, grad_norm=norm,
            learning_rate=rate, step=self.step, gpu_s=self._clock.take() if self._clock else 0.0,
        )  # fmt: skip
        if self._skipped > config.optimizer.max_skipped:
            raise TrainingError(
                f"the gradient norm was not finite in {self._skipped} steps in a row, up to step {self.step}; replay "
                "from the last checkpoint to tell hardware from data, or leave the batches out with data.skip"
            )
        return stops > 0

    def _update(self, rate: float, norm: float, routed: torch.Tensor) -> None:
        if self._optimizer.update(rate, norm):
            self.model.move_biases(routed, self._config.optimizer.balance_rate)
            self._skipped = 0
            return
        self._skipped += 1
        self._reporter.event("update_skipped", **UpdateSkipped(step=self.step, why=f"the gradient norm is {norm}"))
