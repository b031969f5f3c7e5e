"""What torch holds and does for a model on the CPU, counted for one rank of many.

What torch holds of a model after a forward pass, in any layout: one rank of a group whose collectives do nothing.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from opsd.client import Reporter
from opsd.trainer import world as ranks
from opsd.trainer.accumulate import micro_batches
from opsd.trainer.config import Config, load
from opsd.trainer.model import Decoder
from opsd.trainer.optimizer import Optimizer
from opsd.trainer.parallel import build
from opsd.trainer.regions import local_part
from opsd.trainer.train import Training, open_corpora
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


# What a step of the trainer does, counted on the CPU: torch's "fake" process group answers at once for all ranks.


READS = ("tolist", "item", "__bool__", "__float__", "__int__", "nonzero")
"""Methods of a tensor that wait for the device which holds it."""
WARM = 2


class _Operations(TorchDispatchMode):
    """Counts collectives by kind, with their bytes, operations that wait for a device, and copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        if "c10d" in name and "wait" not in name:
            kind = name.partition(".")[2].strip("_").replace("_base", "")
            self.counts[kind] += 1
            self.bytes[kind] += sum(tensor.nbytes for tensor in _tensors(args))
        elif name.startswith(("aten._local_scalar_dense", "aten.nonzero")):
            self.counts["waits"] += 1
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _read_counted(name: str, found: Counter[str]) -> None:
    original = getattr(torch.Tensor, name)

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        frames = [frame for frame in traceback.extract_stack() if "/trainer/" in frame.filename]
        found[f"{name} in {frames[-1].name}"] += 1
        return original(self, *args, **kwargs)

    setattr(torch.Tensor, name, counted)


def main(size: int, source: str, *overrides: str) -> dict[str, Any]:
    """The counts of the third step of a run on ``size`` ranks, of which this is the first.

    What the other ranks send is arbitrary memory, and so is the norm of the gradients: no update is left out for it.
    """
    torch.set_num_threads(1)
    join = dist.init_process_group
    dist.init_process_group = lambda _: join("fake", store=FakeStore(), rank=0, world_size=size)  # type: ignore[assignment,no-untyped-call]
    ranks.await_store = lambda *_: None  # type: ignore[assignment]
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(size)}
    config = load(source, ["run.device=cpu", "optimizer.max_skipped=99", "replay.every=0", *overrides])
    world = ranks.join(config.run, config.parallel)
    training = Training(config, micro_batches(config, size), open_corpora(config), world, Reporter.from_env())
    training._optimizer.set_updates(0)
    update = training._optimizer.update
    training._optimizer.update = lambda rate, _: update(rate, 1.0)  # type: ignore[method-assign]
    training.loader.begin(0)
    saving: Any = SimpleNamespace(
        take_committed=list, votes=lambda _: (0, 0, 0), take_stall=float, save_if_due=lambda *_: False
    )
    nothing: dict[str, Any] = dict.fromkeys(("begin", "poll", "write", "add_routed"), lambda *_, **__: None)
    telemetry: Any = SimpleNamespace(**nothing)
    for _ in range(WARM):
        training.advance(saving, telemetry)
    reads: Counter[str] = Counter()
    for name in READS:
        _read_counted(name, reads)
    with _Operations() as operations:
        training.advance(saving, telemetry)
    training.loader.close()
    return {"reads": reads, "counts": operations.counts, "bytes": operations.bytes}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))
    sys.stdout.flush()
    os._exit(0)
