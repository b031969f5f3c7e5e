"""The rank page: what one training rank is doing, readable by others at any moment.

A rank page is a small file in shared memory with one writer, the rank. It holds the phase the rank is in
and since when, the last completed step and a ring of recent steps. Writing costs about a microsecond
and makes no system call, so a trainer reports every phase of every step. Reading never needs the writer: the page
of a rank that is stopped, killed or stuck in native code says what it was doing and for how long.

Standard library only; copy-paste safe into any trainer::

    reporter = Reporter.from_env()
    for batch in reporter.timed("data", loader):
        with reporter.phase("forward"):
            ...
        reporter.step(tokens=batch.tokens, loss=loss, grad_norm=norm, learning_rate=rate)
        if reporter.stop_requested:
            save_checkpoint()
            break

Layout (little endian, ``PAGE_BYTES`` long). The frequently written part has two slots which are used in turn, each
between two copies of its sequence number: a writer that dies in the middle of one slot leaves the other whole.

======  =====================================================================================
offset  content
======  =====================================================================================
0       header, written once: magic, version, identity of the rank, CRC-32 of all before it
448     model: floating point operations per token, and per second at the device's peak; 0 if not told
512     control word, written by the launcher only
576     up to 8 helper processes of the rank (pid, role), written rarely
1024    slot 0: sequence, phase, state, phase since, steps reported, committed step, sequence
1280    slot 1
2048    ring of 64 step records, since version 1.2 each followed by its learning rate
======  =====================================================================================

Times are CLOCK_MONOTONIC nanoseconds, comparable between processes of one boot.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
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
STATES = ("running", "finished")
REQUESTS = ("none", "checkpoint_and_stop")

PAGE_BYTES = 12_288
RING_STEPS = 64
MAX_WORKERS = 8
MAJOR, MINOR = 1, 2

PERSIST = "persist"
"""Role of a helper process that writes a staged checkpoint; the launcher lets it finish when its rank has died."""

_MAGIC = b"OPSDRANK"
_HEADER = struct.Struct("<8sHHIIIIIiQQQQ64s64s64s")
_CRC = struct.Struct("<I")
_MODEL = struct.Struct("<dd")
_CONTROL = struct.Struct("<I")
_WORKER = struct.Struct("<Q16s")
_SLOT = struct.Struct("<QIIQQqQ")
_STEP = struct.Struct(f"<QQQQQQdd{len(PHASES)}QQ")
_LEARNING_RATE = struct.Struct("<d")
_LEARNING_RATE_SINCE = 2
_MODEL_AT, _CONTROL_AT, _WORKERS_AT, _SLOTS_AT, _SLOT_STRIDE = 448, 512, 576, 1024, 256
_SLOTS_BYTES = _SLOT_STRIDE + _SLOT.size
_READS = 64
"""So often a page is read anew whose writer never rests; one read takes some microseconds."""
_RING_AT, _STEP_STRIDE = 2048, 160

_PHASE_INDEX = {name: index for index, name in enumerate(PHASES)}


class PageError(Exception):
    """A rank page that cannot be used; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One completed step. ``phase_s`` has one entry per name in ``PHASES``, in seconds.

    ``loss`` and ``grad_norm`` are nan, ``learning_rate`` is None where the trainer has not told them.
    """

    step: int
    end: float
    duration_s: float
    tokens: int
    loss: float
    grad_norm: float
    phase_s: tuple[float, ...]
    learning_rate: float | None = None

    def phase(self, name: str) -> float:
        """Seconds spent in the phase ``name`` during this step."""
        return self.phase_s[_PHASE_INDEX[name]]


@dataclass(frozen=True, slots=True)
class RankPage:
    """A consistent copy of a rank page. Times in seconds: ``*_wall`` since the epoch, the others monotonic.

    ``flops_per_token`` and ``peak_flops`` are as in ``Reporter.model``, None if the trainer has not told them.
    """

    rank: int
    local_rank: int
    world_size: int
    generation: int
    gpu: int | None
    pid: int
    pid_start: int
    node: str
    job: str
    run: str
    created_wall: float
    created: float
    state: str
    phase: str
    phase_since: float
    steps_reported: int
    committed_step: int | None
    tokens: int
    request: str
    workers: tuple[tuple[int, str], ...]
    flops_per_token: float | None
    peak_flops: float | None
    steps: tuple[StepRecord, ...] = field(repr=False)

    @property
    def last_step(self) -> StepRecord | None:
        """The newest completed step, or None before the first."""
        return self.steps[-1] if self.steps else None

    @property
    def changed(self) -> float:
        """Monotonic second of the last phase change or step."""
        return max(self.phase_since, self.steps[-1].end if self.steps else self.created)


class _Phase:
    """Reusable context manager for one phase; nested phases resume the outer one on exit."""

    __slots__ = ("_index", "_reporter")

    def __init__(self, reporter: Reporter, index: int) -> None:
        self._reporter = reporter
        self._index = index

    def __enter__(self) -> None:
        self._reporter._enter(self._index)

    def __exit__(self, *exc: object) -> None:
        self._reporter._leave()


class Reporter:
    """The writing side of a rank page. One per process, used from one thread.

    A page that cannot be created (shared memory full or read-only) never stops the training: the reporter then writes
    to private memory and says so once on stderr.
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
    ) -> None:
        header = _HEADER.pack(
            _MAGIC, MAJOR, MINOR, PAGE_BYTES, rank, local_rank, world_size, generation,
            -1 if gpu is None else gpu, os.getpid(), process_start(os.getpid()) or 0,
            time.time_ns(), time.monotonic_ns(),
            node.encode()[:64], job.encode()[:64], run.encode()[:64],
        )  # fmt: skip
        self.path = None if path is None else Path(path)
        self._page = _create_page(self.path, header + _CRC.pack(zlib.crc32(header)))
        self._phases = {name: _Phase(self, index) for name, index in _PHASE_INDEX.items()}
        self._spent = [0] * len(PHASES)
        self._outer: list[int] = []
        self._current = _PHASE_INDEX["setup"]
        self._since = self._step_began = time.monotonic_ns()
        self._sequence = 0
        self._count = 0
        self._step = -1
        self._tokens = 0
        self._committed = -1
        self._state = 0
        self._publish()

    @classmethod
    def from_env(cls) -> Reporter:
        """A reporter configured by the variables that ``opsd launch`` (or torchrun) sets for the rank.

        Under ``opsd launch`` the rank then outlives SIGTERM and SIGUSR1, which Slurm sends to every process of a job:
        the launcher asks it to stop through its page.
        """
        env = os.environ
        gpu = env.get("OPSD_GPU", "")
        if "OPSD_RANK_PAGE" in env:
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
        )

    def phase(self, name: str) -> _Phase:
        """A context manager that marks the time inside it as ``name``, one of ``PHASES``. Raises KeyError otherwise."""
        return self._phases[name]

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
    ) -> None:
        """Report one completed step. ``step`` defaults to the previous one plus 1, starting at 0."""
        now = time.monotonic_ns()
        self._spent[self._current] += now - self._since
        self._step = self._step + 1 if step is None else step
        self._tokens += tokens
        self._count = count = self._count + 1
        at = _RING_AT + (count - 1) % RING_STEPS * _STEP_STRIDE
        _LEARNING_RATE.pack_into(self._page, at + _STEP.size, learning_rate)
        _STEP.pack_into(
            self._page, at, count, self._step, now, now - self._step_began, tokens, self._tokens,
            loss, grad_norm, *self._spent, count,
        )  # fmt: skip
        self._spent = [0] * len(PHASES)
        self._step_began = self._since = now
        if not self._outer:
            self._current = 0
        self._publish()

    def model(self, flops_per_token: float, peak_flops: float) -> None:
        """Tell what is behind the MFU.

        Operations that the model needs for a token, forward and backward, and operations per second that the rank's
        device could do at most: 989e12 for bf16 on an H100 SXM (NVIDIA's data sheet, without sparsity).
        """
        _MODEL.pack_into(self._page, _MODEL_AT, flops_per_token, peak_flops)

    def checkpoint_committed(self, step: int) -> None:
        """Report that the checkpoint of ``step`` is durable."""
        self._committed = step
        self._publish()

    def add_worker(self, pid: int, role: str) -> None:
        """Tell watchers about a helper process of this rank and its role: "data" for the loader, ``PERSIST`` …."""
        for index in range(MAX_WORKERS):
            at = _WORKERS_AT + index * _WORKER.size
            if _WORKER.unpack_from(self._page, at)[0] in (0, pid):
                _WORKER.pack_into(self._page, at, pid, role.encode()[:16])
                return

    def remove_worker(self, pid: int) -> None:
        """Forget a helper process."""
        for index in range(MAX_WORKERS):
            at = _WORKERS_AT + index * _WORKER.size
            if _WORKER.unpack_from(self._page, at)[0] == pid:
                _WORKER.pack_into(self._page, at, 0, b"")

    @property
    def stop_requested(self) -> bool:
        """True once the launcher wants a checkpoint at the next step boundary and an orderly exit."""
        return bool(_CONTROL.unpack_from(self._page, _CONTROL_AT)[0])

    def event(self, kind: str, **fields: object) -> None:
        """Append a rare event (a rejected checkpoint, a skipped batch) as one JSON line beside the page."""
        if self.path is not None:
            append_event(self.path, kind, **fields)

    def close(self) -> None:
        """Mark the rank as finished in good order."""
        self._state = 1
        self._publish()

    def _enter(self, index: int) -> None:
        now = time.monotonic_ns()
        current = self._current
        self._spent[current] += now - self._since
        self._outer.append(current)
        self._current, self._since = index, now
        self._publish()

    def _leave(self) -> None:
        now = time.monotonic_ns()
        self._spent[self._current] += now - self._since
        self._current, self._since = self._outer.pop(), now
        self._publish()

    def _publish(self) -> None:
        self._sequence = sequence = self._sequence + 1
        _SLOT.pack_into(
            self._page, _SLOTS_AT + (sequence & 1) * _SLOT_STRIDE,
            sequence, self._current, self._state, self._since, self._count, self._committed, sequence,
        )  # fmt: skip


def _create_page(path: Path | None, header: bytes) -> mmap.mmap:
    """A writable page that starts with ``header``: at ``path`` if that can be had, in private memory otherwise."""
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
            print(f"opsd: no rank page at {path} ({error}); this rank runs unobserved", file=sys.stderr)
    page = mmap.mmap(-1, PAGE_BYTES)
    page[: len(header)] = header
    return page


def _outlive_stop_signals() -> None:
    """Have the main thread ignore the signals to stop while there is a page; children get the default action back.

    A handler of the program's own stays, or takes the place of this one.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _unless_unobserved)
    os.register_at_fork(after_in_child=_restore_stop_signals)


def _unless_unobserved(number: int, frame: FrameType | None) -> None:
    """Without a page nobody could ask this rank to stop: it then dies of the signal as any process does."""
    page = os.environ.get("OPSD_RANK_PAGE")
    if page is None or not os.path.exists(page):  # noqa: PTH110  # keep pathlib out of the signal handler
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _restore_stop_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is _unless_unobserved:
            signal.signal(number, signal.SIG_DFL)


def append_event(page: Path, kind: str, **fields: object) -> None:
    """Append a rare event of the rank that has ``page``, as its helper processes may. Never raises OSError."""
    line = json.dumps({"t": time.time(), "event": kind, **fields}, default=str)
    try:
        with open(events_path(page), "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        print(f"opsd: event {kind} not recorded: {error}", file=sys.stderr)


def events_path(page: Path) -> Path:
    """Where the rank writes the events that belong to ``page``."""
    return page.with_name(page.name + ".events.jsonl")


def write_request(path: Path, request: str) -> None:
    """Set the control word of the page at ``path`` (the launcher's side). Raises OSError if the page is gone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        os.pwrite(descriptor, _CONTROL.pack(REQUESTS.index(request)), _CONTROL_AT)
    finally:
        os.close(descriptor)


def read_page(path: Path, known: RankPage | None = None) -> RankPage:
    """Read the rank page at ``path``. Steps are taken over from ``known``, an earlier copy, where it has them.

    Reads with ``pread`` and not through a mapping, so that a file truncated by its owner cannot kill the reader.
    Raises PageError when there is no usable page: missing, truncated, foreign, of a newer major version, damaged.
    """
    for _ in range(_READS):
        data, slots, after = _read_bytes(path)
        header = _parse_header(path, data)
        slot = _newest_slot(*slots)
        if slot is not None:
            return _decode(data, header, slot, known, max(_count(after), slot[4]))
    raise PageError(f"{path}: no slot of the page is whole; its writer may have died while creating it")


def _read_bytes(path: Path) -> tuple[bytes, tuple[bytes, bytes, bytes], bytes]:
    """The page; the slots three times before it; the slots after it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise PageError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        earlier = os.pread(descriptor, _SLOTS_BYTES, _SLOTS_AT)
        slots = os.pread(descriptor, _SLOTS_BYTES, _SLOTS_AT)
        later = os.pread(descriptor, _SLOTS_BYTES, _SLOTS_AT)
        data = os.pread(descriptor, PAGE_BYTES, 0)
        after = os.pread(descriptor, _SLOTS_BYTES, _SLOTS_AT)
    except OSError as error:
        raise PageError(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if min(len(data) - PAGE_BYTES, *(len(part) - _SLOTS_BYTES for part in (earlier, slots, later, after))) < 0:
        raise PageError(f"{path}: {len(data)} bytes long, a rank page has {PAGE_BYTES}")
    return data, (earlier, slots, later), after


def _parse_header(path: Path, data: bytes) -> tuple[int | bytes, ...]:
    header: tuple[int | bytes, ...] = _HEADER.unpack_from(data)
    if header[0] != _MAGIC:
        raise PageError(f"{path}: not a rank page")
    if header[1] != MAJOR:
        raise PageError(
            f"{path}: layout version {header[1]!r}, this opsd reads version {MAJOR}; "
            "use the same opsd release in the job and on the node"
        )
    if _CRC.unpack_from(data, _HEADER.size)[0] != zlib.crc32(data[: _HEADER.size]):
        raise PageError(f"{path}: the header does not match its checksum")
    return header


def _newest_slot(earlier: bytes, slots: bytes, later: bytes) -> tuple[int, ...] | None:
    """The newest of ``slots`` that is whole: ended before ``earlier``, and not begun to be written again by ``later``.

    The two sequence numbers of one copy do not tell that: its bytes were read one after the other, beside the writer.
    """
    whole = []
    for at in (0, _SLOT_STRIDE):
        slot = _SLOT.unpack_from(slots, at)
        written, begun = _SLOT.unpack_from(earlier, at)[-1], _SLOT.unpack_from(later, at)[0]
        if slot[0] and written == slot[0] == slot[-1] == begun and slot[1] < len(PHASES) and slot[2] < len(STATES):
            whole.append(slot)
    return max(whole, default=None)


def _count(slots: bytes) -> int:
    """How many steps there are at least."""
    found = [_SLOT.unpack_from(slots, at) for at in (0, _SLOT_STRIDE)]
    return max((int(slot[4]) for slot in found if slot[0] == slot[-1]), default=0)


def _decode_steps(
    data: bytes, minor: int, count: int, known: RankPage | None, reached: int
) -> tuple[tuple[StepRecord, ...], int]:
    """The steps in the ring of a page with ``count`` steps, and the tokens of all steps; ``known`` is of that page.

    Steps in whose place the one after ``reached`` comes, or an earlier one, may have been overwritten meanwhile.
    """
    oldest = max(1, reached - RING_STEPS + 2)
    records: list[StepRecord] = []
    decoded, tokens = 0, 0
    if known is not None and oldest <= known.steps_reported <= count:
        decoded, tokens = known.steps_reported, known.tokens
        records += known.steps[oldest - decoded - 1 :]
    for number in range(max(oldest, decoded + 1), count + 1):
        at = _RING_AT + (number - 1) % RING_STEPS * _STEP_STRIDE
        entry = _STEP.unpack_from(data, at)
        if entry[0] != number or entry[-1] != number:
            continue
        _, step, end, duration, step_tokens, tokens, loss, norm, *phases, _ = entry
        phase_s = tuple(ns / 1e9 for ns in phases)
        rate = _LEARNING_RATE.unpack_from(data, at + _STEP.size)[0] if minor >= _LEARNING_RATE_SINCE else math.nan
        records.append(
            StepRecord(
                step, end / 1e9, duration / 1e9, step_tokens, loss, norm, phase_s, None if math.isnan(rate) else rate
            )
        )
    return tuple(records), tokens


def _decode(
    data: bytes, header: tuple[int | bytes, ...], slot: tuple[int, ...], known: RankPage | None, reached: int
) -> RankPage:
    def number(index: int) -> int:
        return int(header[index])

    def text(index: int) -> str:
        return bytes(header[index]).rstrip(b"\0").decode(errors="replace")

    _, phase, state, since, count, committed, _ = slot
    writer = number(9), number(10), number(12) / 1e9
    same_writer = known is not None and (known.pid, known.pid_start, known.created) == writer
    steps, tokens = _decode_steps(data, number(2), count, known if same_writer else None, reached)
    workers = (_WORKER.unpack_from(data, _WORKERS_AT + i * _WORKER.size) for i in range(MAX_WORKERS))
    flops_per_token, peak_flops = _MODEL.unpack_from(data, _MODEL_AT)
    request = min(_CONTROL.unpack_from(data, _CONTROL_AT)[0], len(REQUESTS) - 1)
    return RankPage(
        rank=number(4), local_rank=number(5), world_size=number(6), generation=number(7),
        gpu=None if number(8) < 0 else number(8), pid=writer[0], pid_start=writer[1],
        created_wall=number(11) / 1e9, created=writer[2],
        node=text(13), job=text(14), run=text(15),
        state=STATES[state], phase=PHASES[phase], phase_since=since / 1e9, steps_reported=count,
        committed_step=None if committed < 0 else committed, tokens=tokens, request=REQUESTS[request],
        workers=tuple((pid, role.rstrip(b"\0").decode(errors="replace")) for pid, role in workers if pid),
        flops_per_token=flops_per_token if flops_per_token > 0 else None,
        peak_flops=peak_flops if peak_flops > 0 else None,
        steps=steps,
    )  # fmt: skip


def process_start(pid: int, proc: str = "/proc") -> int | None:
    """Start time of ``pid`` in clock ticks since boot (proc(5), field 22), or None if there is no such process."""
    fields = _stat_fields(pid, proc)
    return int(fields[19]) if fields else None


def process_runs(pid: int, start: int) -> bool:
    """Whether this process runs; one that has ended and that nobody has waited for (a zombie) does not."""
    fields = _stat_fields(pid, "/proc")
    return fields is not None and int(fields[19]) == start and fields[0] not in ("Z", "X")


def process_state(page: RankPage, proc: str = "/proc") -> str | None:
    """The kernel's state letter of the rank's process (R, S, D, T, Z …), or None if it is gone or its pid is reused."""
    fields = _stat_fields(page.pid, proc)
    if fields is None or int(fields[19]) != page.pid_start:
        return None
    return fields[0]


def _stat_fields(pid: int, proc: str) -> list[str] | None:
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None
