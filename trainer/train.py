"""The training loop.

Every heavy import of a run stands at the top of a module that this one imports: an interpreter that has imported
``trainer.train`` starts a rank without delay. ``torch._dynamo`` is among them because optimisers and FSDP
import it in their first step otherwise.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist

from opsd.checkpoints.manifest import steps
from opsd.client import Reporter
from trainer.accumulate import accumulator, micro_batches
from trainer.audit import Audit
from trainer.checkpoint import Saver, State, kept, training_state, writers
from trainer.config import Config, ConfigError
from trainer.data.loader import Loader
from trainer.data.mixture import Mixture
from trainer.data.sources import Source, open_sources, sizes
from trainer.evaluations import Evaluations
from trainer.exchange import pair, tidy
from trainer.huggingface import fill
from trainer.interval import Interval
from trainer.metrics import METRICS, MetricsLog
from trainer.model import count_parameters, flops_per_token
from trainer.optimizer import Optimizer
from trainer.parallel import build
from trainer.persist import Plan
from trainer.restore import restore
from trainer.schedule import rate_factor
from trainer.tracking import Tracking, demand_installed
from trainer.world import World, join

CHECKPOINTS = "checkpoints"
SETTLE_POLL_S = 0.01
SEEN_WITHIN_S = 5.0
"""A network file system may show a new file on other nodes this late."""


class TrainingError(Exception):
    """The training cannot go on; the message is one sentence that says why."""


def train(config: Config, *, fresh: bool = False) -> bool:
    """Train to ``config.run.steps``, or to the step at which a stop is requested.

    Returns False if the last state could not be saved. Raises ConfigError, DataError or RestoreError for what a user
    can put right, and TrainingError after too many gradients in a row that were not finite.
    """
    reporter = Reporter.from_env()
    demand_installed(config.tracking)
    sources = open_corpora(config)
    world = join(config.run, config.parallel)
    counts = {batch: micro_batches(config, world, batch) for batch in config.data.batches}
    loader = Loader(config, sources, world, reporter)
    model = build(config, world)
    gradients = accumulator(model, loader, config, world, reporter)
    optimizer = Optimizer(model, config.optimizer)
    state = training_state(model, optimizer)

    folder = Path(config.run.folder)
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    if world.nodes > 1:
        demand_common(folder / CHECKPOINTS, world)
    mixture = config.data.mix(sizes(sources, config.data.sequence), config.run.seed)
    digest = partial(config.digest, mixture, {name: source.index.digest for name, source in sources.items()})
    manifest = restore(
        folder / CHECKPOINTS, state, world, digest, reporter, remote=config.checkpoint.remote, fresh=fresh
    )
    if manifest is None and config.run.initial:
        fill(model, Path(config.run.initial))
    optimizer.set_updates(state["updates"].local.item())
    step, sample = (manifest.step, manifest.sample) if manifest else (0, 0)
    loader.begin(sample)

    paired = config.checkpoint.replicas and world.nodes > 1
    if reporter.path is not None:
        tidy(reporter.path.parent, world)
    audit = Audit(model, world, reporter)
    audit(step)
    saver = Saver(
        persist_plan(config, world, state),
        kept(state, model, world),
        reporter,
        committed=max(steps(folder / CHECKPOINTS), default=0),
        pairing=pair(world, os.environ.get("OPSD_JOB_SECRET", "")) if paired else None,
    )
    flops = flops_per_token(count_parameters(config.model), config.model, config.data.sequence)
    reporter.model(flops, config.metrics.peak_flops)
    metrics = MetricsLog(folder / METRICS, config, flops, world.size) if world.rank == 0 else None
    evaluations = Evaluations(config, folder, reporter) if world.rank == 0 and config.evaluation.wanted else None
    if world.rank == 0:
        tell_mixture(reporter, mixture, config, step, sample)
    tracking = Tracking(config, folder, reporter) if world.rank == 0 else None
    interval = Interval(config.checkpoint, time.monotonic())
    due = stop = False
    skipped = 0
    while step < config.run.steps and not stop:
        step += 1
        batch = config.data.batch_at(step)
        sample += batch
        rate = config.optimizer.lr * rate_factor(step, config.schedule)
        local_loss = gradients(counts[batch])
        with reporter.phase("collective"):
            watch(saver, evaluations)
            # One all-reduce carries all that the ranks must agree on.
            is_due = world.rank == 0 and interval.due(step, time.monotonic())
            flags = (reporter.stop_requested, saver.busy, saver.failed, is_due)
            loss_sum, square, stops, busy, failed, now_due = world.sum(
                (local_loss, optimizer.take_gradients(), *map(float, flags))
            )
        # Every rank of the last stage has contributed the loss of its part of the batch.
        loss, norm, stop = loss_sum / (world.size // config.parallel.pp), math.sqrt(square), stops > 0
        with reporter.phase("optimizer"):
            skipped = 0 if optimizer.update(rate, norm) else skipped + 1
            if skipped:
                reporter.event("update_skipped", step=step, why=f"the gradient norm is {norm}")
        if failed:
            saver.abandon()
        due = due or now_due > 0
        if due and not busy:
            audit(step)
            began = time.monotonic()
            saver.save(step, sample, digest(sample))
            interval.saved(began, time.monotonic() - began)
            if world.rank == 0:
                tell_mixture(reporter, mixture, config, step, sample)
            due = False
        reporter.step(
            tokens=batch * config.data.sequence // world.size, loss=loss, grad_norm=norm,
            learning_rate=rate, step=step,
        )  # fmt: skip
        if metrics is not None:
            metrics.write(
                step=step, tokens=sample * config.data.sequence, loss=loss, grad_norm=norm, lr=rate,
                data_s=loader.take_wait(), checkpoint_s=saver.take_stall(),
            )  # fmt: skip
        if skipped > config.optimizer.max_skipped:
            raise TrainingError(
                f"the gradient norm was not finite in {skipped} steps in a row, up to step {step}; replay from the "
                "last checkpoint to tell hardware from data, or leave the batches out with data.skip"
            )
    loader.close()
    with reporter.phase("checkpoint"):
        saved = finish(saver, world, step, sample, digest(sample))
    if evaluations is not None:
        with reporter.phase("evaluation"):
            watch(saver, evaluations)
            evaluations.close()
    if tracking is not None:
        tracking.close()
    reporter.close()
    dist.destroy_process_group()
    return saved


def tell_mixture(reporter: Reporter, mixture: Mixture, config: Config, step: int, sample: int) -> None:
    """Say what the run has drawn from each source in its first ``sample`` samples, which ends ``step``."""
    drawn = mixture.drawn(sample)
    reporter.event(
        "data_mixture",
        step=step,
        tokens={name: samples * config.data.sequence for name, samples in drawn.items()},
        epochs={name: samples / mixture.sizes[name] for name, samples in drawn.items()},
    )


def watch(saver: Saver, evaluations: Evaluations | None) -> None:
    """Take notice of checkpoints that have become durable; never waits."""
    saver.poll()
    if evaluations is not None:
        for step in saver.take_committed():
            evaluations.add(step)
        evaluations.poll(time.monotonic())


def open_corpora(config: Config) -> dict[str, Source]:
    """The run's corpora; each local rank has compared its part of the files with the indexes. Raises DataError."""
    part, parts = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return open_sources(config.data, config.model.vocab, part=part, parts=parts)


def persist_plan(config: Config, world: World, state: State) -> Plan:
    """What the persist processes of this start of the run need to know."""
    attempt = world.from_first(secrets.randbits(32))
    return Plan(
        root=str(Path(config.run.folder) / CHECKPOINTS), rank=world.rank, world=world.size, attempt=f"{attempt:08x}",
        layout=world.layout, run=os.environ.get("OPSD_RUN", ""), keep=config.checkpoint.keep,
        every=config.checkpoint.keep_every, remote=config.checkpoint.remote, evaluated=config.evaluation.wanted,
        writers=writers(state, world),
    )  # fmt: skip


def demand_common(folder: Path, world: World) -> None:
    """All nodes see the same ``folder``, which the parts of a checkpoint need. Raises ConfigError."""
    probe = folder / f".start.{world.from_first(secrets.randbits(62))}"
    if world.rank == 0:
        probe.touch()
    world.least(0)
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (seen := probe.exists()) and time.monotonic() < deadline:
        time.sleep(SETTLE_POLL_S)
    blind = [str(rank) for rank, (sees,) in enumerate(world.gather([seen])) if not sees]
    if world.rank == 0:
        probe.unlink()
    if blind:
        raise ConfigError(
            f"run.folder {folder.parent} is not the same folder on all nodes: what rank 0 writes there is not seen by "
            f"rank{'s' * (len(blind) > 1)} {', '.join(blind)}; put it on storage that the nodes share"
        )


def finish(saver: Saver, world: World, step: int, sample: int, digest: str) -> bool:
    """See the checkpoint of the last ``step`` through on all ranks; False if that failed."""
    if not settle(saver, world, step):
        saver.save(step, sample, digest)
    saved = settle(saver, world, step)
    saver.close()
    if saved:
        saver.release()
    return saved


def settle(saver: Saver, world: World, step: int) -> bool:
    """Wait until no rank has a checkpoint on its way; then whether that of ``step`` is committed."""
    while True:
        saver.poll()
        busy, failed, committed = world.sum([saver.busy, saver.failed, saver.committed == step])
        if failed:
            saver.abandon()
        elif not busy:
            return committed == world.size
        time.sleep(SETTLE_POLL_S)
