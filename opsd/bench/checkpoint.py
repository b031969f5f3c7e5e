"""What a checkpoint of 2 GB costs the training, beside torch.save and torch's distributed checkpoint (DCP).

nvidia-resiliency-ext cannot be compared without a GPU: it stages by copying from one, and its saves call torch.cuda.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from opsd.bench import memory_folder
from opsd.checkpoints.manifest import folder_of, read, verify
from opsd.client import Reporter
from opsd.trainer.checkpoint import Saver, State
from opsd.trainer.load import load, load_memory
from opsd.trainer.memory import info_path, read_info
from opsd.trainer.parts import PersistPlan
from opsd.trainer.regions import Region

STATE_BYTES = 2_000_000_000
TENSORS = 240
"""Parameters and moments of a model of 80 tensors."""

STEP_WIDTH = 1024
"""The training step that is timed: square matrices of this size, multiplied on one thread."""

ROUNDS, QUIET_STEPS = 3, 20
COPIES = 5

Results = dict[str, float]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds in which training was blocked, slowdown factor of steps during the save, seconds until durable."""

    blocked_s: float
    slowdown: float
    durable_s: float


def run() -> Results:
    """Medians of three saves each. Blocked: time in which no step ran; slowdown: median step during the save.

    ``ratio_blocked`` is over one copy of the state in memory, ``ratio_persist`` the speed of our write over what fio
    writes in sequence, ``ratio_restore`` the restore from disk over that from memory, both into the same state; the
    disk's files are not in the page cache.
    """
    with tempfile.TemporaryDirectory(dir=_disk()) as disk, memory_folder() as shared:
        torch.set_num_threads(1)
        tensors = [torch.randn(STATE_BYTES // TENSORS // 4) for _ in range(TENSORS)]
        step = _step()
        copy_s = _copy_seconds(tensors)
        results = {"copy_s": copy_s} | _ours(tensors, step, Path(disk), shared)
        results["ratio_blocked"] = results["ours_blocked_s"] / copy_s
        if fio := _fio(Path(disk)):
            results["fio_write_mb_s"] = fio
            results["ratio_persist"] = results["ours_persist_mb_s"] / fio
        for name, cost in _peers(tensors, step, Path(disk)):
            results |= {
                f"{name}_blocked_s": cost.blocked_s,
                f"{name}_slowdown": cost.slowdown,
                f"{name}_save_s": cost.durable_s,
            }
    return results


def _disk() -> str:
    return os.environ.get("OPSD_BENCH_DISK", tempfile.gettempdir())


def _step() -> Callable[[], float]:
    matrix, product = torch.randn(STEP_WIDTH, STEP_WIDTH), torch.empty(STEP_WIDTH, STEP_WIDTH)

    def step() -> float:
        began = time.perf_counter()
        torch.mm(matrix, matrix, out=product)
        return time.perf_counter() - began

    return step


def _copy_seconds(tensors: list[torch.Tensor]) -> float:
    copies = [torch.empty_like(tensor).zero_() for tensor in tensors]
    times = []
    for _ in range(COPIES):
        began = time.perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _measure(begin: Callable[[], object], done: Callable[[], bool], step: Callable[[], float]) -> Cost:
    """Call ``begin``, then train until ``done``; both calls block the training."""
    quiet = [step() for _ in range(QUIET_STEPS)]
    began = time.perf_counter()
    begin()
    blocked, steps = time.perf_counter() - began, []
    while True:
        called = time.perf_counter()
        finished = done()
        blocked += time.perf_counter() - called
        if finished:
            break
        steps.append(step())
    durable = time.perf_counter() - began
    quiet += [step() for _ in range(QUIET_STEPS)]
    return Cost(blocked, statistics.median(steps) / statistics.median(quiet) if steps else 1.0, durable)


def _median(costs: list[Cost]) -> Cost:
    return Cost(
        *(statistics.median(getattr(cost, field) for cost in costs) for field in ("blocked_s", "slowdown", "durable_s"))
    )


def _ours(tensors: list[torch.Tensor], step: Callable[[], float], disk: Path, shared: Path) -> Results:
    state: State = {
        f"model.{number}": Region(tensor, tuple(tensor.shape), (0,)) for number, tensor in enumerate(tensors)
    }
    root = disk / "ours"
    root.mkdir()
    plan = PersistPlan(str(root), 0, 1, "00000001", {"dp": 1}, "bench", keep=1)
    saver = Saver(plan, state, Reporter(shared / "rank-0000.page"), committed=0)
    costs, persists = [], []
    for number in range(1, ROUNDS + 2):

        def done() -> bool:
            saver.poll()
            return not saver.busy

        costs.append(_measure(partial(saver.save, number, 0, ""), done, step))
        record = info_path(shared, 0).stat().st_mtime
        persists.append(read(folder_of(root, number)).created - record)
    cost = _median(costs[1:])  # the first starts the process
    restores = _restores(state, folder_of(root, ROUNDS + 1), shared)
    saver.close()
    return {
        "ours_blocked_s": cost.blocked_s,
        "ours_slowdown": cost.slowdown,
        "ours_save_s": cost.durable_s,
        "ours_persist_mb_s": STATE_BYTES / 1e6 / statistics.median(persists[1:]),
    } | restores


def _restores(state: State, folder: Path, shared: Path) -> Results:
    """Seconds to verify and copy into ``state``, from memory and from disk, as at the start of a run."""
    record = read_info(shared, 0)
    assert record is not None
    times: dict[str, list[float]] = {"memory": [], "disk": []}
    for _ in range(ROUNDS):
        began = time.perf_counter()
        load_memory(shared, record, state)
        times["memory"].append(time.perf_counter() - began)
        _drop_cache(folder)
        began = time.perf_counter()
        load(folder, verify(folder), state)
        times["disk"].append(time.perf_counter() - began)
    memory_s, disk_s = (statistics.median(times[tier]) for tier in ("memory", "disk"))
    return {
        "ours_restore_memory_s": memory_s, "ours_restore_disk_s": disk_s, "ratio_restore": disk_s / memory_s,
    }  # fmt: skip


def _drop_cache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _fio(disk: Path) -> float | None:
    """MB/s that fio writes in sequence, the better of past and through the page cache; None without fio."""
    if not shutil.which("fio"):
        return None
    speeds = []
    for direct in (0, 1):
        command = [
            "fio", "--name=write", f"--filename={disk / 'fio'}", "--rw=write", "--bs=4M", f"--size={STATE_BYTES}",
            f"--direct={direct}", "--end_fsync=1", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (disk / "fio").unlink(missing_ok=True)
        if done.returncode == 0:
            speeds.append(json.loads(done.stdout)["jobs"][0]["write"]["bw_bytes"] / 1e6)
    return max(speeds, default=None)


def _peers(tensors: list[torch.Tensor], step: Callable[[], float], disk: Path) -> Iterator[tuple[str, Cost]]:
    state: dict[str, Any] = {f"model.{number}": tensor for number, tensor in enumerate(tensors)}
    yield "torch_save", _saves(disk, step, lambda path: torch.save(state, path / "state.pt"))
    with _alone_in_the_world():
        yield "dcp", _saves(disk, step, lambda path: save(state, checkpoint_id=path))
        for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
            yield f"dcp_{kind.value}", _saves(disk, step, partial(_async_save, state, kind))


def _async_save(state: dict[str, Any], kind: AsyncCheckpointerType, path: Path) -> Any:
    return async_save(state, checkpoint_id=path, async_checkpointer_type=kind)


def _saves(disk: Path, step: Callable[[], float], write: Callable[[Path], Any]) -> Cost:
    """The cost of ``write``, including a future that it returns. The first save is a warm-up and is not counted."""
    costs = []
    for _ in range(ROUNDS + 1):
        with tempfile.TemporaryDirectory(dir=disk) as folder:
            costs.append(_one_save(partial(write, Path(folder)), step))
    return _median(costs[1:])


def _one_save(write: Callable[[], Any], step: Callable[[], float]) -> Cost:
    future: Any = None

    def begin() -> None:
        nonlocal future
        future = write()

    return _measure(begin, lambda: not hasattr(future, "done") or future.done(), step)


@contextmanager
def _alone_in_the_world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
