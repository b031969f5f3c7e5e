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

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from opsd.client import Reporter
from trainer.checkpoint import Saver, training_state
from trainer.config import Config, ConfigError
from trainer.data.loader import Loader
from trainer.data.sources import Source, open_sources, sizes
from trainer.metrics import MetricsLog
from trainer.model import Decoder
from trainer.optimizer import Optimizer
from trainer.parallel import World, build, join
from trainer.persist import Plan
from trainer.restore import restore
from trainer.schedule import warmup_stable_decay

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
SETTLE_POLL_S = 0.01


def train(config: Config, *, fresh: bool = False) -> bool:
    """Train to ``config.run.steps``, or to the step at which a stop is requested.

    Returns False if the last state could not be saved. Raises ConfigError, DataError or RestoreError for what a user
    can put right.
    """
    reporter = Reporter.from_env()
    sources = open_corpora(config)
    world = join(config.run)
    micro_steps = accumulation(config, world.size)
    loader = Loader(config, sources, world, reporter)
    model = build(config, world)
    optimizer = Optimizer(model, config.optimizer)
    state = training_state(model, optimizer)

    folder = Path(config.run.folder)
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    mixture = config.data.mix(sizes(sources, config.data.sequence), config.run.seed)
    digest = partial(config.digest, mixture, {name: source.index.digest for name, source in sources.items()})
    manifest = restore(folder / CHECKPOINTS, state, world, digest, reporter, fresh=fresh)
    optimizer.set_updates(state["updates"].local.item())
    step, sample = (manifest.step, manifest.sample) if manifest else (0, 0)
    loader.begin(sample)

    saver = Saver(persist_plan(config, world), state, reporter, committed=step)
    size = sum(parameter.numel() for parameter in model.parameters())
    metrics = MetricsLog(folder / METRICS, config, size, world.size) if world.rank == 0 else None
    due = stop = False
    while step < config.run.steps and not stop:
        step += 1
        sample += config.data.batch
        rate = config.optimizer.lr * warmup_stable_decay(step, config.schedule)
        local_loss = gradients(model, loader, micro_steps, config.optimizer.z_loss, reporter)
        with reporter.phase("collective"):
            saver.poll()
            # One all-reduce carries all that the ranks must agree on.
            loss_sum, square, stops, busy, failed = world.sum(
                [local_loss, optimizer.take_gradients(), reporter.stop_requested, saver.busy, saver.failed]
            )
        loss, norm, stop = loss_sum / world.size, math.sqrt(square), stops > 0
        with reporter.phase("optimizer"):
            if not optimizer.update(rate, norm):
                reporter.event("update_skipped", step=step, why=f"the gradient norm is {norm}")
        if failed:
            saver.abandon()
        due = due or step % config.checkpoint.every == 0
        if due and not busy:
            saver.save(step, sample, digest(sample))
            due = False
        tokens = config.data.batch * config.data.sequence
        reporter.step(tokens=tokens // world.size, loss=loss, grad_norm=norm, step=step)
        if metrics is not None:
            metrics.write(
                step=step, tokens=sample * config.data.sequence, loss=loss, grad_norm=norm, lr=rate,
                data_s=loader.take_wait(), checkpoint_s=saver.take_stall(),
            )  # fmt: skip
    loader.close()
    with reporter.phase("checkpoint"):
        saved = finish(saver, world, step, sample, digest(sample))
    reporter.close()
    dist.destroy_process_group()
    return saved


def open_corpora(config: Config) -> dict[str, Source]:
    """The run's corpora; each local rank has compared its part of the files with the indexes. Raises DataError."""
    part, parts = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return open_sources(config.data, config.model.vocab, part=part, parts=parts)


def accumulation(config: Config, ranks: int) -> int:
    """Micro-batches that each rank runs per step. Raises ConfigError if the global batch does not divide."""
    data = config.data
    count, rest = divmod(data.batch, ranks * data.micro_batch)
    if rest:
        raise ConfigError(
            f"data.batch {data.batch} is not a multiple of {ranks} ranks x data.micro_batch {data.micro_batch}"
        )
    return count


def gradients(model: Decoder, loader: Loader, micro_steps: int, z_loss: float, reporter: Reporter) -> torch.Tensor:
    """Accumulate the gradients of one step; returns this rank's mean loss, a scalar in nats per token."""
    assert isinstance(model, FSDPModule)
    total = torch.zeros((), device=loader.device)
    for number in range(1, micro_steps + 1):
        batch = loader.next()
        model.set_requires_gradient_sync(number == micro_steps)
        with reporter.phase("forward"):
            loss = model(batch.tokens, batch.documents, batch.targets, z_loss) / micro_steps
        with reporter.phase("backward"):
            torch.autograd.backward(loss)
        total += loss.detach()
    return total


def persist_plan(config: Config, world: World) -> Plan:
    """What the persist processes of this start of the run need to know."""
    attempt = world.from_first(secrets.randbits(32))
    return Plan(
        root=str(Path(config.run.folder) / CHECKPOINTS), rank=world.rank, world=world.size, attempt=f"{attempt:08x}",
        layout=world.layout, run=os.environ.get("OPSD_RUN", ""), keep=config.checkpoint.keep,
    )  # fmt: skip


def finish(saver: Saver, world: World, step: int, sample: int, digest: str) -> bool:
    """See the checkpoint of the last ``step`` through on all ranks; False if that failed."""
    if not settle(saver, world, step):
        saver.save(step, sample, digest)
    saved = settle(saver, world, step)
    saver.close()
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
