"""What torch holds of a model after a forward pass, in any layout: one rank of a group whose collectives do nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from opsd.trainer.config import Config
from opsd.trainer.model import Decoder
from opsd.trainer.optimizer import Optimizer
from opsd.trainer.parallel import build
from opsd.trainer.regions import local_part
from opsd.trainer.world import World, mesh_shape


class Storages(TorchDispatchMode):
    """Remembers every storage that an operation returns, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and type(value) is torch.Tensor:
                storage = value.untyped_storage()
                self._live[storage._cdata] = weakref.ref(storage)
        return result

    def bytes(self) -> int:
        """Of those that live."""
        gc.collect()
        return sum(storage.nbytes() for ref in self._live.values() if (storage := ref()) is not None)


@contextmanager
def rank_of(config: Config, ranks: int) -> Iterator[tuple[Decoder, World]]:
    """The first of ``ranks`` ranks, with its part of the model."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        shape = mesh_shape(ranks, config.parallel)
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        world = World(0, ranks, torch.device("cpu"), mesh, config.parallel)
        yield build(config, world), world
    finally:
        dist.destroy_process_group()


def state_bytes(model: Decoder, config: Config) -> dict[str, int]:
    """Bytes of this rank's weights and moments."""
    optimizer = Optimizer(model, config.optimizer)
    weights = sum(local_part(value).untyped_storage().nbytes() for value in model.parameters())
    moments = sum(
        value.untyped_storage().nbytes() for name in optimizer.shards for value in optimizer.moments(name).values()
    )
    return {"weights": weights, "optimizer": moments}


def activation_bytes(model: Decoder, config: Config) -> int:
    """What lives after a forward pass through the layers, beside what FSDP has gathered."""
    data = config.data
    tokens = torch.randint(0, config.model.vocab, (data.micro_batch, data.sequence))
    documents = torch.zeros(data.micro_batch, data.sequence, dtype=torch.int32)
    model.routing.begin(1, torch.device("cpu"))

    storages = Storages()
    with storages:
        result = model(tokens, documents, tokens)
    held = storages.bytes()
    del result
    return held - storages.bytes()
