"""What the ranks agree on while one of them is busy for longer than a collective may last."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from trainer_world import CONTEXT

from opsd.trainer.settings import ParallelSettings
from opsd.trainer.world import World

LIMIT_S = 4.0
BUSY_S = 6.0


def rank_main(rank: int, folder: Path) -> None:
    """Hear from the first rank what it knows only after ``BUSY_S``, with collectives that end after ``LIMIT_S``."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world = World(rank, 2, torch.device("cpu"), init_device_mesh("cpu", (2,)), ParallelSettings())
    world.least(0)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S))
    known_at = time.monotonic() + BUSY_S
    heard = world.once_first_has(lambda: 42 if time.monotonic() > known_at else None)
    (folder / str(rank)).write_text(str(heard))


@pytest.mark.long
def test_waiting_for_the_first_rank_runs_into_no_time_limit(tmp_path: Path) -> None:
    """All ranks hear what it took the first one longer to find out than a collective may last."""
    ranks = [CONTEXT.Process(target=rank_main, args=(rank, tmp_path), name=f"trainer rank {rank}") for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["42", "42"]
