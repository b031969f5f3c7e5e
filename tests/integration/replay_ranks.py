"""Ranks that train and replay with faults planted in what they compute, on gloo."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from trainer_world import CONTEXT

from opsd.client import Reporter, events_path
from opsd.ports import free_port
from opsd.trainer.accumulate import accumulator, micro_batches
from opsd.trainer.config import Config, load
from opsd.trainer.data.loader import Batch
from opsd.trainer.optimizer import Optimizer
from opsd.trainer.parallel import build
from opsd.trainer.regions import local_part
from opsd.trainer.replay import Repeatable, Replay
from opsd.trainer.world import join

SHAPE = (
    "run.device=cpu", "run.threads=1", "run.steps=10", "data.shards=-", "data.micro_batch=1", "data.sequence=32",
    "model.layers=2", "model.width=32", "model.heads=4", "model.kv_heads=2", "model.ffn=48", "model.vocab=96",
    "optimizer.z_loss=1e-4", "replay.every=1",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """One bit that ``rank`` gets wrong in the module ``module``, in every ``every``-th call from ``first`` on.

    It computes ``replays`` replays meanwhile. "noise" is a program that is not deterministic: another number in every
    call, on all ranks. "nothing" is no fault.
    """

    what: str
    rank: int
    module: str = "blocks.1.ffn.up"
    every: int = 1000
    first: int = 1
    replays: int = 1


class RandomTokens:
    """The same on all ranks of a data-parallel rank."""

    def __init__(self, config: Config, share: int) -> None:
        self._random = torch.Generator().manual_seed(share)
        self._shape = (config.data.micro_batch, config.data.sequence + 1)
        self._vocab = config.model.vocab

    def next(self) -> Batch:
        """A micro-batch with two documents a row."""
        ids = torch.randint(self._vocab, self._shape, generator=self._random)
        documents = (torch.arange(self._shape[1] - 1) > 11).int().expand(self._shape[0], -1).contiguous()
        return Batch(0, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), documents)


def flip(values: torch.Tensor) -> None:
    """Change one bit of the mantissa of the middle value, in place."""
    local = local_part(values).data
    words = local.view(torch.int32 if local.element_size() == 4 else torch.int16)
    words.view(-1)[words.numel() // 2] ^= 1 << (20 if local.element_size() == 4 else 5)


@contextmanager
def planted(model: nn.Module, fault: Fault, rank: int) -> Iterator[None]:
    """The ``fault`` in what ``model`` computes, on its rank only."""
    modules = dict(model.named_modules())
    if fault.module not in modules:  # in another stage
        yield
        return
    # The head is no call of its own: the loss multiplies by its weight.
    module, name = (model, "loss") if fault.module == "head" else (modules[fault.module], "forward")
    forward, passes = getattr(module, name), 0

    def hit() -> bool:
        return rank == fault.rank and passes >= fault.first and (passes - fault.first) % fault.every == 0

    def flipped_gradient(gradient: torch.Tensor) -> torch.Tensor:
        wrong = gradient.clone()
        flip(wrong)
        return wrong

    def corrupted(x: torch.Tensor, *more: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        weight = more[0] if more else module.weight
        assert isinstance(weight, torch.Tensor)
        if hit() and fault.what == "weight":
            flip(weight)
        if hit() and fault.what == "gradient" and more:
            x.register_hook(flipped_gradient)  # type: ignore[no-untyped-call]
        result: torch.Tensor = forward(x, *more)
        if hit() and fault.what == "weight":
            flip(weight)  # the copy is wrong only while it is read
        if hit() and fault.what == "activation":
            result = result.clone()
            flip(result)
        if hit() and fault.what == "gradient" and not more:
            result.register_hook(flipped_gradient)  # type: ignore[no-untyped-call]
        if fault.what == "noise":
            result = result * (1 + 1e-3 * passes)
        return result

    setattr(module, name, corrupted)
    try:
        yield
    finally:
        setattr(module, name, forward)


def rank_main(settings: Sequence[str], environment: Mapping[str, str], faults: Sequence[Fault]) -> None:
    """A rank: the replays with each of ``faults``, 1000 n + 1 and so on with fault n; a step before every hundredth."""
    os.environ.update(environment)
    config = load("tiny", [*SHAPE, *settings], {})
    world = join(config.run, config.parallel)
    reporter = Reporter.from_env()
    model = build(config, world)
    batches = Repeatable(RandomTokens(config, world.data_rank))
    gradients = accumulator(model, batches, config, world, reporter)
    replay, optimizer = Replay(model, batches, gradients, config, world, reporter), Optimizer(model, config.optimizer)
    count = micro_batches(config, world.size)[config.data.shape_at(1)]

    def step() -> None:
        gradients(count)
        (square,) = world.sum((optimizer.take_gradients(),))
        optimizer.update(1e-3, square**0.5)

    for number, fault in enumerate(faults):
        step()
        with planted(model, fault, world.rank):
            for at in range(fault.replays):
                if at % 100 == 99:
                    step()
                replay(1000 * number + at + 1)
    reporter.close()
    dist.destroy_process_group()


def run_ranks(folder: Path, world: int, settings: Sequence[str], faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """The events ``replay_differs`` of all ranks, each with the rank that wrote it."""
    port = free_port()
    pages = [folder / f"rank-{rank:04d}.page" for rank in range(world)]
    ranks = []
    for rank in range(world):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OPSD_RANK_PAGE": str(pages[rank]),
            "OPSD_RUN": "test", "OPSD_RUN_DIR": str(folder),
        }  # fmt: skip
        arguments = ([*settings, f"data.batch={world}"], environment, faults)
        ranks.append(CONTEXT.Process(target=rank_main, args=arguments, name=f"trainer rank {rank}"))
        ranks[-1].start()
    for process in ranks:
        process.join(600)
    assert [process.exitcode for process in ranks] == [0] * world
    return [
        {**event, "rank": rank}
        for rank, page in enumerate(pages)
        if events_path(page).exists()
        for line in events_path(page).read_text().splitlines()
        if (event := json.loads(line))["event"] == "replay_differs"
    ]
