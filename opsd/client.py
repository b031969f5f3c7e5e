"""The rank page: what one training rank is doing, readable by others at any time. This is the writing side.

A rank page is a small file in shared memory with one writer, the rank. It holds the current phase and its start, the
last completed step and a ring of recent steps. A write takes about a microsecond and no system call, so a trainer can
report every phase of every step. Readers (``opsd.rank_page``) do not need the writer. The page of a rank that is
stopped, killed or stuck in native code still shows its phase and duration.

Standard library only; copy-paste safe into any trainer::

    reporter = Reporter.from_env()
    for step, batch in enumerate(reporter.timed("data", loader), first):
        with reporter.phase("forward"):
            ...
        reporter.step(step=step, tokens=batch.tokens, loss=loss, grad_norm=norm, learning_rate=rate)
        if reporter.stop_requested:
            save_checkpoint()
            break

Layout (little endian, ``PAGE_BYTES`` long). The part that changes often has two slots, written in turn. Each slot is
between two copies of its sequence number: a writer that dies while writing one slot leaves the other intact.

======  =====================================================================================
offset  content
======  =====================================================================================
0       header, written once: magic, version, identity of the rank, CRC-32 of all before it
448     model: floating point operations per token, and per second at the device's peak; 0 if unknown
464     since version 1.3, who reports: an index of ``SOURCES``
468     since version 1.4, 1 and the rank's place in the layout (dp, pp, tp, cp), or 0 if it is unknown
480     since version 1.5, the step after which the run ends, or 0 if it is unknown
488     since version 1.7, 1 if steps are counted from the start of the process and not of the run
512     control word, written by the launcher only
576     up to 8 helper processes of the rank (pid, role), written rarely
768     since version 1.6, of a mixture of experts: load, its limit, entropy, dropped share; load 0 if unknown
1024    slot 0: sequence, phase, state, phase since, steps reported, committed step, sequence
1280    slot 1
2048    ring of 64 step records, since version 1.2 each followed by its learning rate, since 1.4 by GPU nanoseconds
======  =====================================================================================

Times are CLOCK_MONOTONIC nanoseconds, comparable between processes of one boot.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic_ns
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

PHASES = (
    "other",
    "setup",
    "data",
    "forward",
    "backward",
    "optimizer",
    "collective",
    "checkpoint",
    "evaluation",
)

SOURCES = ("client", "adapter", "observed")
"""Who reports: the program itself, an adapter of ``opsd.adapters``, or the launcher's hooks in an unchanged program.

What is observed has no tokens, loss or gradient norm; its forward phase is all compute that no hook tells apart.
"""

PAGE_BYTES = 12_288
RING_STEPS = 64
MAX_WORKERS = 8
MAJOR, MINOR = 1, 7

PERSIST = "persist"
"""Role of a helper process that writes a staged checkpoint; the launcher lets it finish after its rank has died."""

MAGIC = b"OPSDRANK"
HEADER = struct.Struct("<8sHHIIIIIiQQQQ64s64s64s")
CRC = struct.Struct("<I")
MODEL = struct.Struct("<dd")
SOURCE = struct.Struct("<I")
PLACE = struct.Struct("<IHHHH")
PLANNED = struct.Struct("<Q")
RELATIVE = struct.Struct("<I")
CONTROL = struct.Struct("<I")
WORKER = struct.Struct("<Q16s")
ROUTER = struct.Struct("<dddd")
SLOT = struct.Struct("<QIIQQqQ")
STEP = struct.Struct(f"<QQQQQQdd{len(PHASES)}QQdQ")
MODEL_AT, SOURCE_AT, PLACE_AT, PLANNED_AT, RELATIVE_AT, CONTROL_AT = 448, 464, 468, 480, 488, 512
WORKERS_AT, ROUTER_AT, SLOTS_AT, SLOT_STRIDE = 576, 768, 1024, 256
RING_AT, STEP_STRIDE = 2048, 160

PHASE_INDEX = {name: index for index, name in enumerate(PHASES)}
NOTHING_SPENT = [0] * len(PHASES)


class _Phase:
    """Reusable context manager for one phase; nested phases resume the outer one on exit."""

    __slots__ = ("_index", "_reporter")

    def __init__(self, reporter: Reporter, index: int) -> None:
        self._reporter = reporter
        self._index = index

    def __enter__(self) -> None:
        now, reporter = monotonic_ns(), self._reporter
        current = reporter._current
        reporter._spent[current] += now - reporter._since
        reporter._outer.append(current)
        reporter._current, reporter._since = self._index, now
        reporter._publish()

    def __exit__(self, *exc: object) -> None:
        now, reporter = monotonic_ns(), self._reporter
        reporter._spent[reporter._current] += now - reporter._since
        reporter._current, reporter._since = reporter._outer.pop(), now
        reporter._publish()


class Reporter:
    """The writer of a rank page. One per process, used from one thread.

    If the page cannot be created (shared memory full or read-only), the training goes on. The reporter then writes to
    private memory and prints one line on stderr.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        generation: int = 0,
        gpu: int | None = None,
        node: str = "",
        job: str = "",
        run: str = "",
        source: str = "client",
    ) -> None:
        header = HEADER.pack(
            MAGIC, MAJOR, MINOR, PAGE_BYTES, rank, local_rank, world_size, generation,
            -1 if gpu is None else gpu, os.getpid(), process_start(os.getpid()) or 0,
            time.time_ns(), monotonic_ns(),
            node.encode()[:64], job.encode()[:64], run.encode()[:64],
        )  # fmt: skip
        self.path = None if path is None else Path(path)
        self._page = _create_page(self.path, header + CRC.pack(zlib.crc32(header)))
        SOURCE.pack_into(self._page, SOURCE_AT, SOURCES.index(source))
        self._phases = {name: _Phase(self, index) for name, index in PHASE_INDEX.items()}
        self._spent = NOTHING_SPENT.copy()
        self._outer: list[int] = []
        self._current = PHASE_INDEX["setup"]
        self._since = self._step_began = monotonic_ns()
        self._sequence = 0
        self._count = 0
        self._step = 0
        self._is_relative = False
        self._tokens = 0
        self._committed = -1
        self._state = 0
        self._publish()

    @classmethod
    def from_env(cls, source: str = "client") -> Reporter:
        """A reporter configured by the variables that ``opsd launch`` (or torchrun) sets for the rank.

        ``source`` is one of ``SOURCES``. Under ``opsd launch`` the rank then ignores SIGTERM and SIGUSR1, which Slurm
        sends to every process of a job: the launcher requests the stop through the page. One that is observed reads no
        requests and keeps its signals.
        """
        env = os.environ
        gpu = env.get("OPSD_GPU", "")
        if "OPSD_RANK_PAGE" in env and source != "observed":
            _outlive_stop_signals()
        return cls(
            env.get("OPSD_RANK_PAGE"),
            rank=int(env.get("RANK", "0")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            world_size=int(env.get("WORLD_SIZE", "1")),
            generation=int(env.get("OPSD_GENERATION", "0")),
            gpu=int(gpu) if gpu else None,
            node=env.get("OPSD_NODE", os.uname().nodename),
            job=env.get("OPSD_JOB", env.get("SLURM_JOB_ID", "")),
            run=env.get("OPSD_RUN", ""),
            source=source,
        )

    def phase(self, name: str) -> _Phase:
        """A context manager that marks the time inside it as ``name``, one of ``PHASES``. Raises KeyError otherwise."""
        return self._phases[name]

    def enter(self, name: str) -> None:
        """Mark the time from now on as ``name``, one of ``PHASES``: for who knows when phases begin, and no ends."""
        now = monotonic_ns()
        self._spent[self._current] += now - self._since
        self._current, self._since = PHASE_INDEX[name], now
        self._publish()

    def timed(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield from ``items`` with the time spent waiting for each one marked as the phase ``name``."""
        iterator, phase = iter(items), self._phases[name]
        while True:
            with phase:
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def step(
        self,
        *,
        tokens: int = 0,
        loss: float = float("nan"),
        grad_norm: float = float("nan"),
        learning_rate: float = float("nan"),
        step: int | None = None,
        gpu_s: float = 0.0,
    ) -> None:
        """Report one completed step. ``step`` is its number in the run, which goes on after a restart.

        Without it this process counts its own steps from 1, and it stays unknown how many are done again after a
        restart.
        ``gpu_s``: seconds that the GPU computed in this step or one shortly before, by CUDA events that are read when
        they are complete; 0.0 if unknown.
        """
        now = monotonic_ns()
        self._spent[self._current] += now - self._since
        if (step is None) != self._is_relative:
            self._is_relative = step is None
            RELATIVE.pack_into(self._page, RELATIVE_AT, self._is_relative)
        self._step = self._step + 1 if step is None else step
        self._tokens += tokens
        self._count = count = self._count + 1
        at = RING_AT + (count - 1) % RING_STEPS * STEP_STRIDE
        STEP.pack_into(
            self._page, at, count, self._step, now, now - self._step_began, tokens, self._tokens, loss, grad_norm,
            *self._spent, count, learning_rate, int(gpu_s * 1e9) if gpu_s > 0 else 0,
        )  # fmt: skip
        self._spent = NOTHING_SPENT.copy()
        self._step_began = self._since = now
        if not self._outer:
            self._current = 0
        self._publish()

    def place(self, *, dp: int = 0, pp: int = 0, tp: int = 0, cp: int = 0) -> None:
        """Report the rank's coordinates in the parallel layout, so that it is compared with ranks of equal work."""
        PLACE.pack_into(self._page, PLACE_AT, 1, dp, pp, tp, cp)

    def planned(self, last_step: int) -> None:
        """Report the step after which the run ends, for the time that is left."""
        PLANNED.pack_into(self._page, PLANNED_AT, last_step)

    def model(self, flops_per_token: float, peak_flops: float) -> None:
        """Report the parameters of the MFU.

        ``flops_per_token``: operations that the model needs per token, forward and backward. ``peak_flops``: peak
        operations per second of the rank's device, for instance 989e12 for bf16 on an H100 SXM (NVIDIA's data sheet,
        without sparsity).
        """
        MODEL.pack_into(self._page, MODEL_AT, flops_per_token, peak_flops)

    def router(self, *, load: float, limit: float, entropy: float, dropped: float = 0.0) -> None:
        """Report how the routers of a mixture of experts spread the tokens of the last step, of the worst layer each.

        ``load``: tokens of the fullest expert over the mean; ``limit``: the load if all tokens went to the same experts
        (experts / experts per token). ``entropy`` of a token's weights, as a share of the greatest. ``dropped``: share
        of the tokens that found no place at an expert.
        """
        ROUTER.pack_into(self._page, ROUTER_AT, load, limit, entropy, dropped)

    def checkpoint_committed(self, step: int) -> None:
        """Report that the checkpoint of ``step`` is durable."""
        self._committed = step
        self._publish()

    def add_worker(self, pid: int, role: str) -> None:
        """Register a helper process of this rank with its role: "data" for a loader, ``PERSIST``, and so on."""
        for index in range(MAX_WORKERS):
            at = WORKERS_AT + index * WORKER.size
            if WORKER.unpack_from(self._page, at)[0] in (0, pid):
                WORKER.pack_into(self._page, at, pid, role.encode()[:16])
                return

    def remove_worker(self, pid: int) -> None:
        """Forget a helper process."""
        for index in range(MAX_WORKERS):
            at = WORKERS_AT + index * WORKER.size
            if WORKER.unpack_from(self._page, at)[0] == pid:
                WORKER.pack_into(self._page, at, 0, b"")

    @property
    def stop_requested(self) -> bool:
        """True once the launcher has requested a checkpoint at the next step boundary and an orderly exit."""
        return bool(CONTROL.unpack_from(self._page, CONTROL_AT)[0])

    def event(self, kind: str, **fields: object) -> None:
        """Append a rare event (a rejected checkpoint, a skipped batch) as one JSON line beside the page."""
        if self.path is not None:
            append_event(self.path, kind, **fields)

    def close(self) -> None:
        """Mark the rank as finished in good order."""
        self._state = 1
        self._publish()

    def _publish(self) -> None:
        self._sequence = sequence = self._sequence + 1
        SLOT.pack_into(
            self._page, SLOTS_AT + (sequence & 1) * SLOT_STRIDE,
            sequence, self._current, self._state, self._since, self._count, self._committed, sequence,
        )  # fmt: skip


def _create_page(path: Path | None, header: bytes) -> mmap.mmap:
    """A writable page that starts with ``header``: at ``path`` if possible, else in private memory."""
    if path is not None:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
            try:
                # Reserved up front: a sparse page on a full tmpfs would kill the rank with SIGBUS at first touch.
                os.posix_fallocate(descriptor, 0, PAGE_BYTES)
                page = mmap.mmap(descriptor, PAGE_BYTES)
                page[: len(header)] = header
                os.rename(draft, path)
                return page
            finally:
                os.close(descriptor)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            print(f"opsd: no rank page at {path} ({error}); this rank runs unobserved", file=sys.stderr)
    page = mmap.mmap(-1, PAGE_BYTES)
    page[: len(header)] = header
    return page


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def _outlive_stop_signals() -> None:
    """Ignore the stop signals in the main thread while there is a page; child processes get the default action back.

    A handler of the program's own is kept, and may replace this one.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _STOP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _unless_unobserved)
    _keep_from_children()


def _unless_unobserved(number: int, frame: FrameType | None) -> None:
    """Without a page nobody could request a stop: the process then dies of the signal."""
    page = os.environ.get("OPSD_RANK_PAGE")
    if page is None or not os.path.exists(page):  # noqa: PTH110  # keep pathlib out of the signal handler
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


@cache
def _keep_from_children() -> None:
    """Once: what a child gets before it has the default action back waits until then, and ends it like any other."""
    before = threading.local()

    def block() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def restore() -> None:
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is _unless_unobserved:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)


def append_event(page: Path, kind: str, **fields: object) -> None:
    """Append a rare event of the rank that owns ``page``; helper processes may call it too. Never raises OSError."""
    line = json.dumps({"t": time.time(), "event": kind, **fields}, default=str)
    try:
        with open(events_path(page), "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        print(f"opsd: event {kind} not recorded: {error}", file=sys.stderr)


def events_path(page: Path) -> Path:
    """Where the rank writes the events that belong to ``page``."""
    return page.with_name(page.name + ".events.jsonl")


def process_start(pid: int, proc: str = "/proc") -> int | None:
    """Start time of ``pid`` in clock ticks since boot (proc(5), field 22), or None if there is no such process."""
    fields = stat_fields(pid, proc)
    return int(fields[19]) if fields else None


def stat_fields(pid: int, proc: str) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, None if there is no such process (proc(5))."""
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None
