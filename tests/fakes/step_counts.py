"""What a step of the trainer does, counted on the CPU: torch's "fake" process group answers at once for all ranks."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from opsd.client import Reporter
from opsd.trainer import world as ranks
from opsd.trainer.accumulate import micro_batches
from opsd.trainer.config import load
from opsd.trainer.train import Training, open_corpora

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
