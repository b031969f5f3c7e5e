"""Saving the training state without stopping the training.

Each rank has a region of shared memory with the exact layout of its checkpoint file (``opsd.trainer.memory``). To save
is to copy the state into it, and the training only waits for that. A separate process, ``opsd.trainer.persist``, writes
the memory to disk, and once every rank's file is durable the first rank's process commits the manifest.

The safetensors file holds the rank's regions of the tensors ``model.NAME``, ``exp_avg.NAME`` and ``exp_avg_sq.NAME``
(not for parameters of Muon). ``updates`` is the number of optimiser steps taken. Its metadata key
``regions`` is a JSON object that maps each name to ``{"shape": shape of the whole tensor, "offset": where the region
begins in it}``, from which any other layout can select its own regions.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from opsd.checkpoints import remote
from opsd.checkpoints.manifest import CheckpointError
from opsd.client import PERSIST, Reporter
from opsd.events import CheckpointCopyFailed, CheckpointFailed, CheckpointUnproved
from opsd.trainer import memory
from opsd.trainer.locks import hold_lock, saving
from opsd.trainer.model import Decoder
from opsd.trainer.optimizer import Optimizer
from opsd.trainer.parts import PersistPlan
from opsd.trainer.regions import Region, region_of
from opsd.trainer.replica import KEY, Pairing
from opsd.trainer.world import World
from opsd.words import of_file

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}
_ALIGNMENT = 64
UPDATES = "updates"
STOP_S = 10
"""How long a stopping run waits for an upload. ``opsd launch`` gives the whole stop 120 s, 20 s if hurried."""

State = dict[str, Region]


def kept(state: State, model: Decoder, world: World) -> State:
    """What this rank saves of ``state``: of regions that several ranks of its node hold, only the first rank's copy.

    So the memory of a node contains everything that its ranks need.
    """
    beginning = world.rank % (world.size // world.parallel.pp)  # of this rank's pipeline

    def ours(name: str) -> bool:
        shared = not model.first and name.partition(".")[2] in model.shared
        earlier = (*state[name].earlier, beginning) if shared else state[name].earlier
        return world.node_of(world.rank) not in map(world.node_of, earlier)

    return {name: region for name, region in state.items() if ours(name)}


def writers(state: State, world: World) -> tuple[int, ...]:
    """The ranks that hold regions that no lower rank holds, and so write a file. All ranks call it together."""
    alone = any(not region.earlier for name, region in state.items() if name != UPDATES)
    return tuple(rank for rank, (writes,) in enumerate(world.gather([alone])) if writes)


def training_state(model: Decoder, optimizer: Optimizer, world: World) -> State:
    """Everything a resumed run needs besides its position in the data, as this rank's regions of named tensors."""
    state: State = {}
    per_stage = world.size // world.parallel.pp
    same = tuple(range(world.stage * per_stage, world.rank))
    for name, buffer in model.named_buffers():
        state[f"model.{name}"] = replace(region_of(buffer), earlier=same)
    for name, parameter in model.named_parameters():
        region = region_of(parameter)
        state[f"model.{name}"] = region
        for moment, values in optimizer.moments(name).items():
            state[f"{moment}.{name}"] = replace(region, local=values)
    state[UPDATES] = region_of(optimizer.updates.view(1))
    return state


def file_layout(state: State) -> tuple[bytes, dict[str, int], int]:
    """The header of this rank's file, the position of each tensor in it, and the size of the file, in bytes."""
    entries: dict[str, object] = {}
    starts: dict[str, int] = {}
    regions = {name: {"shape": region.shape, "offset": region.offset} for name, region in state.items()}
    entries["__metadata__"] = {"format": "pt", "regions": json.dumps(regions)}
    end = 0
    for name, region in state.items():
        starts[name], end = end, end + region.local.numel() * region.local.element_size()
        entries[name] = {
            "dtype": _DTYPES[region.local.dtype],
            "shape": list(region.local.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: start + len(header) for name, start in starts.items()}, len(header) + end


class StateFile:
    """A rank's file, mapped: ``regions`` says where in the whole tensor each of its tensors begins.

    Use it as a context manager. Raises OSError, or CheckpointError if it is not such a file.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # all pages at once take a third of the time
            self._mapping = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        self._content = memoryview(self._mapping)
        try:
            end = 8 + int.from_bytes(self._content[:8], "little")
            header = json.loads(bytes(self._content[8:end]))
            regions = json.loads(header.pop("__metadata__")["regions"])
            self.regions = {name: tuple(region["offset"]) for name, region in regions.items()}
            self._entries = {
                name: (_TYPES[entry["dtype"]], entry["shape"], end + entry["data_offsets"][0])
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not a rank's file of a checkpoint: {error!r}", path.name) from error

    def tensor(self, name: str) -> torch.Tensor:
        """A view of a tensor, to be copied before the file is closed."""
        dtype, shape, start = self._entries[name]
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return _view(self._mapping, start, torch.empty(shape, dtype=dtype, device="meta"))

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._content.release()


class Saver:
    """Checkpoints of one rank. All ranks call ``save`` at the same steps, and only when none of them is busy."""

    def __init__(
        self, plan: PersistPlan, state: State, reporter: Reporter, committed: int, pairing: Pairing | None = None
    ) -> None:
        self._reporter = reporter
        self._regions = list(state.values())
        header, starts, size = file_layout(state)
        self._shared = reporter.path.parent if reporter.path else None
        descriptor = self._allocate(plan, size)
        self._plan = replace(
            plan, memory=descriptor, size=size, locks=hold_lock(Path(plan.root), plan.rank),
            shared=str(self._shared or ""),
        )  # fmt: skip
        self._key = ""
        if pairing is not None and self._shared is not None:
            self._plan = replace(self._plan, target=pairing.target, source=pairing.source, listener=pairing.listener)
            self._key = pairing.key
        staged = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        if staged[: len(header)] != header:
            if self._shared is not None:
                memory.forget(self._shared, plan.rank)
            staged[: len(header)] = header
        self._staged = [_view(staged, starts[name], region.local) for name, region in state.items()]
        self._process: subprocess.Popen[bytes] | None = None
        self._step: int | None = None
        self._number = 0
        self._replies = b""
        self._stall_s = 0.0
        self._newly_committed: list[int] = []
        self.committed = committed
        """Step of the newest durable checkpoint."""
        self.failed = False
        """Whether this rank's part could not be written; reset by ``abandon`` once the other ranks know."""
        self.why = ""
        """Why the last save that failed did, or why it is not proved to be durable."""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint of this rank is being written."""
        return self._step is not None

    def save(self, step: int, sample: int, digest: str) -> None:
        """Copy the state after ``step`` into the shared memory and have it persisted.

        ``sample`` and ``digest`` go into the manifest: the position in the data, and the identity of model and data.
        """
        assert not self.busy
        began = time.perf_counter()
        with self._reporter.phase("checkpoint"):
            if self._shared is not None:
                memory.forget(self._shared, self._plan.rank)
            for staged, region in zip(self._staged, self._regions, strict=True):
                staged.copy_(region.local)
        self._stall_s += time.perf_counter() - began
        self._step = step
        self._number += 1
        if self._process is None:
            self._process = self._start()
        command = {"save": step, "number": self._number, "sample": sample, "digest": digest}
        self._send_command(self._process, command)

    def poll(self) -> None:
        """Process answers of the persist process; never waits."""
        if self._process is None or not self.busy:
            return
        assert self._process.stdout is not None
        received: bytes | None = self._process.stdout.read(1 << 16)
        if received is None:
            return
        if not received:
            self._fail(f"the persist process ended with status {self._process.wait()}")
            self.close()
            return
        *lines, self._replies = (self._replies + received).split(b"\n")
        for line in lines:
            self._reply(**json.loads(line))

    def abandon(self) -> None:
        """Give up the checkpoint being written, because another rank's part of it failed."""
        self.failed = False
        if self._process is not None and self.busy:
            self._send_command(self._process, {"abandon": self._step})

    def take_stall(self) -> float:
        """Seconds that the training waited for staging since the last call."""
        seconds, self._stall_s = self._stall_s, 0.0
        return seconds

    def take_committed(self) -> list[int]:
        """Steps whose checkpoints became durable since the last call."""
        newly, self._newly_committed = self._newly_committed, []
        return newly

    def close(self) -> None:
        """Let the persist process end, which it does after its upload; a stopping run waits ``STOP_S`` for that.

        After that the process goes on alone, and what it does not upload is uploaded with the next checkpoint.
        """
        if self._process is None:
            return
        stopping_s = 0
        for _ in range(remote.LIMIT_S):
            try:
                self._process.communicate(timeout=1.0)
            except subprocess.TimeoutExpired:
                stopping_s += self._reporter.stop_requested
                if stopping_s > STOP_S:
                    return
                renew(self._reporter)
            else:
                break
        self._reporter.remove_worker(self._process.pid)
        self._process, self._replies = None, b""

    def release(self) -> None:
        """Free the shared memory, after a normal end of the run."""
        if self._shared is not None:
            memory.remove(self._shared, self._plan.rank)
            if self._plan.source >= 0:
                memory.remove(self._shared, self._plan.source)

    def _allocate(self, plan: PersistPlan, size: int) -> int:
        """Memory for the staged file: beside the rank page, where the next start finds it, or else private."""
        if self._shared is not None:
            try:
                if saving(Path(plan.root), plan.rank):  # it must not see its memory change
                    memory.remove(self._shared, plan.rank)
                return memory.open_state(self._shared, plan.rank, size)
            except OSError as error:
                print(f"opsd: checkpoints will not outlive the rank in memory: {of_file(error)}", file=sys.stderr)
                self._shared = None
        descriptor = os.memfd_create("opsd-checkpoint")
        os.posix_fallocate(descriptor, 0, size)
        return descriptor

    def _start(self) -> subprocess.Popen[bytes]:
        # In a session of its own and without the mark: who kills a rank and all that it has started, as the guard of a
        # launcher that was killed does, must not kill the copy of its state.
        environment = {name: value for name, value in os.environ.items() if name != "OPSD_LAUNCHER"}
        inherited = (self._plan.memory, self._plan.locks, self._plan.listener)
        plan = replace(self._plan, remote=remote.without_user(self._plan.remote))
        secrets = {KEY: self._key, remote.URL: self._plan.remote}
        process = subprocess.Popen(
            [sys.executable, "-m", "opsd.trainer.persist", json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=[descriptor for descriptor in inherited if descriptor >= 0],
            env=environment | {name: secret for name, secret in secrets.items() if secret},
            start_new_session=True,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._reporter.add_worker(process.pid, PERSIST)
        return process

    def _send_command(self, process: subprocess.Popen[bytes], command: Mapping[str, object]) -> None:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has died; poll finds out
            process.stdin.write(json.dumps(command).encode() + b"\n")

    def _reply(self, state: str, why: str = "", copy: str = "") -> None:
        if copy:
            self._reporter.event("checkpoint_copy_failed", **CheckpointCopyFailed(step=self._step, why=copy))
        if state == "failed":
            self._fail(why)
        elif state == "unproved":
            self.why = why
            self._reporter.event("checkpoint_unproved", **CheckpointUnproved(step=self._step, why=why))
        elif state == "committed" and self._step is not None:
            self.committed = self._step
            self._newly_committed.append(self._step)
            self._reporter.checkpoint_committed(self._step)
        self._step = None

    def _fail(self, why: str) -> None:
        self._reporter.event("checkpoint_failed", **CheckpointFailed(step=self._step, why=why))
        self.failed, self._step, self.why = True, None, why or self.why


def renew(reporter: Reporter) -> None:
    """Restart the phase's clock on the rank page: the wait is bounded here, so it is not a hang for the launcher."""
    with reporter.phase("checkpoint"):
        pass


def _view(memory: mmap.mmap, start: int, like: torch.Tensor) -> torch.Tensor:
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)
