"""The trainer's side of the prefetch process: batches in order, also if the process dies."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple

import torch

from opsd.client import Reporter
from opsd.events import DataWorkerRestarted
from opsd.trainer.config import Config
from opsd.trainer.data.shards import DataError
from opsd.trainer.data.sources import Source, sizes
from opsd.trainer.data.worker import SAMPLE_BYTES, Form, Plan, micro_batches, slot_views
from opsd.trainer.data_settings import Cut
from opsd.trainer.world import World

MAX_DEATHS = 3


class Batch(NamedTuple):
    """One micro-batch, starting with sample ``sample``; the tensors are [rows, length]."""

    sample: int
    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor


class Loader:
    """Micro-batches of this rank, from the global sample given to ``begin``.

    The worker starts at once, to be ready when the sample is known. One that dies, for instance because an operator
    killed it, is replaced by one that continues with the next sample. Waiting has no limit: slow storage is not a
    failure. Only after ``MAX_DEATHS`` deaths in a row without a batch does the loader give up.
    """

    def __init__(self, config: Config, sources: Mapping[str, Source], world: World, reporter: Reporter) -> None:
        data = config.data
        mixture = data.mix(sizes(sources, data), config.run.seed)
        self.device = world.device
        self._reporter = reporter
        self._plan = Plan(
            sources={name: _place(sources[cut.source], cut) for name, cut in data.cuts().items()},
            stages=[(stage.start, stage.weights) for stage in mixture.stages],
            forms=[Form(data.position(shape.start), shape.sequence, shape.micro_batch) for shape in data.shapes],
            skips=mixture.skips,
            seed=config.run.seed,
            rank=world.data_rank,
            ranks=world.data_size,
            slots=data.prefetch,
            ring=os.memfd_create("opsd-batches"),
            parent=os.getpid(),
        )
        os.posix_fallocate(self._plan.ring, 0, self._plan.slots * self._plan.slot_bytes)
        self._memory = mmap.mmap(self._plan.ring, self._plan.slots * self._plan.slot_bytes)
        self._slot = self._deaths = 0
        self._wait_s = 0.0
        self._worker = self._start()

    def begin(self, sample: int) -> None:
        """Let the worker read from the global sample ``sample``. Call it once, before ``next``."""
        self._expected = micro_batches(self._plan, sample)
        self._next, self._form = next(self._expected)
        self._send_begin()

    def next(self) -> Batch:
        """The next micro-batch; waits for it in the phase "data". Raises DataError if there will be none."""
        began = time.perf_counter()
        with self._reporter.phase("data"):
            while not (ready := self._receive()):
                self._replace()
            sample = int.from_bytes(ready, "little")
            assert sample == self._next, f"the worker sent sample {sample}, expected {self._next}"
            tokens, documents = copied(self._memory, self._plan, self._slot, self._form, self.device)
            batch = Batch(sample, tokens[:, :-1], tokens[:, 1:], documents)
            self._send(bytes(1))
        self._wait_s += time.perf_counter() - began
        self._deaths = 0
        self._slot = (self._slot + 1) % self._plan.slots
        self._next, self._form = next(self._expected)
        return batch

    def take_wait(self) -> float:
        """Seconds that the training waited for data since the last call."""
        seconds, self._wait_s = self._wait_s, 0.0
        return seconds

    def close(self) -> None:
        """End the worker."""
        self._worker.kill()
        self._worker.communicate()
        self._reporter.remove_worker(self._worker.pid)
        os.close(self._plan.ring)

    def _start(self) -> subprocess.Popen[bytes]:
        worker = subprocess.Popen(
            [sys.executable, "-m", "opsd.trainer.data.worker", json.dumps(asdict(self._plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(self._plan.ring,),
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
        self._reporter.add_worker(worker.pid, "data")
        return worker

    def _send_begin(self) -> None:
        self._slot = 0
        begin = self._next - self._plan.rank * self._form.rows
        self._send(begin.to_bytes(SAMPLE_BYTES, "little") + bytes(self._plan.slots))

    def _send(self, message: bytes) -> None:
        assert self._worker.stdin is not None
        with suppress(BrokenPipeError):  # it has died; the next receive finds out
            self._worker.stdin.write(message)

    def _receive(self) -> bytes:
        assert self._worker.stdout is not None
        return self._worker.stdout.read(SAMPLE_BYTES)

    def _replace(self) -> None:
        self._worker.communicate()
        pid, why = self._worker.pid, _exit_reason(self._worker.returncode)
        self._reporter.remove_worker(pid)
        self._deaths += 1
        if self._deaths == MAX_DEATHS:
            raise DataError(f"the data worker died {MAX_DEATHS} times in a row at sample {self._next}, last by {why}")
        self._worker = self._start()
        self._send_begin()
        fields = DataWorkerRestarted(pid=pid, why=why, sample=self._next, new_pid=self._worker.pid)
        self._reporter.event("data_worker_restarted", **fields)


def copied(
    memory: mmap.mmap, plan: Plan, slot: int, form: Form, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [rows, length + 1] and documents [rows, length] of the ``slot`` of ``memory``, on the device.

    All go in one copy. For a GPU they are first moved into pinned memory, so that no copy waits for it.
    """
    tokens, documents = slot_views(memory, plan, slot, form)
    filled = torch.frombuffer(
        memory, dtype=torch.uint8, count=tokens.nbytes + documents.nbytes, offset=slot * plan.slot_bytes
    )
    pinned = filled.pin_memory() if device.type == "cuda" else filled
    moved = pinned.to(device, non_blocking=True, copy=True)
    parts = moved[: tokens.nbytes], moved[tokens.nbytes :]
    return parts[0].view(torch.int64).view(tokens.shape), parts[1].view(torch.int32).view(documents.shape)


def _place(source: Source, cut: Cut) -> tuple[str, str, int, bool]:
    return str(source.folder), str(source.fallback or ""), cut.length, cut.within


def _exit_reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
