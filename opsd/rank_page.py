"""The reading side of the rank page (``opsd.client`` is the writing side, which defines the layout)."""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from opsd import client as layout
from opsd.client import PHASES as PHASES
from opsd.client import SOURCES as SOURCES
from opsd.client import process_start as process_start
from opsd.inodes import open_beside

STATES = ("running", "finished")
REQUESTS = ("none", "checkpoint_and_stop")
_LEARNING_RATE_SINCE = 2
_GPU_SINCE = 4
_RELATIVE_SINCE = 7
_SLOTS_BYTES = layout.SLOT_STRIDE + layout.SLOT.size
_READS = 400
"""Attempts to read a page whose writer is busy; one takes a few microseconds."""


class PageError(Exception):
    """A rank page that cannot be used; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One completed step. ``phase_s`` has seconds for each name in ``PHASES``.

    ``gpu_s`` is 0.0 if unknown.
    ``loss`` and ``grad_norm`` are nan, ``learning_rate`` is None if the trainer has not reported them.
    """

    step: int
    end: float
    duration_s: float
    tokens: int
    loss: float
    grad_norm: float
    phase_s: tuple[float, ...]
    learning_rate: float | None = None
    gpu_s: float = 0.0

    def phase(self, name: str) -> float:
        """Seconds spent in the phase ``name`` during this step."""
        return self.phase_s[layout.PHASE_INDEX[name]]


@dataclass(frozen=True, slots=True)
class RankPage:
    """A consistent copy of a rank page. Times in seconds: ``*_wall`` since the epoch, the others monotonic.

    ``flops_per_token`` and ``peak_flops`` are as in ``Reporter.model``, None if not reported. ``source`` is one of
    ``SOURCES``; a page of a release before 1.3 of the layout counts as "client".
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
    source: str = "client"
    place: tuple[int, int, int, int] | None = None
    planned: int | None = None
    """The step after which the run ends."""
    router: tuple[float, float, float, float] | None = None
    """Load, limit, entropy and dropped share as in ``Reporter.router``."""
    relative: bool = False
    """The numbers of steps are counted from the start of the process and not of the run."""

    @property
    def last_step(self) -> StepRecord | None:
        """The newest completed step, or None before the first."""
        return self.steps[-1] if self.steps else None

    @property
    def observed(self) -> bool:
        """The program does not know of the page: it has not agreed to phases, and reads no request."""
        return self.source == "observed"

    @property
    def changed(self) -> float:
        """Monotonic second of the last phase change or step."""
        return max(self.phase_since, self.steps[-1].end if self.steps else self.created)


def write_request(path: Path, request: str) -> None:
    """Set the control word of the page at ``path`` (the launcher's side). Raises OSError if the page is gone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        os.pwrite(descriptor, layout.CONTROL.pack(REQUESTS.index(request)), layout.CONTROL_AT)
    finally:
        os.close(descriptor)


def read_page(path: Path, known: RankPage | None = None, *, folder: int | None = None) -> RankPage:
    """Read the rank page at ``path``, in the open ``folder`` if that is given.

    Steps that ``known``, an earlier copy, already has are reused.

    Uses ``pread`` instead of a mapping, so that a file truncated by its owner cannot kill the reader. Raises PageError
    if there is no usable page: missing, truncated, foreign, damaged, or of a newer major version.
    """
    for _ in range(_READS):
        data, slots, after = _read_bytes(path, folder)
        header = _parse_header(path, data)
        slot = _newest_slot(*slots)
        if slot is not None:
            return _decode(data, header, slot, known, max(_count(after), slot[4]))
    raise PageError(f"{path}: no slot of the page is whole; its writer may have died while creating it")


def _open(path: Path, folder: int | None) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK
    return os.open(path, flags | os.O_NOFOLLOW) if folder is None else open_beside(path, folder, flags)


def _read_bytes(path: Path, folder: int | None) -> tuple[bytes, tuple[bytes, bytes, bytes], bytes]:
    """The page; three reads of the slots before it; one after it."""
    try:
        descriptor = _open(path, folder)
    except OSError as error:
        raise PageError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        earlier = os.pread(descriptor, _SLOTS_BYTES, layout.SLOTS_AT)
        slots = os.pread(descriptor, _SLOTS_BYTES, layout.SLOTS_AT)
        later = os.pread(descriptor, _SLOTS_BYTES, layout.SLOTS_AT)
        data = os.pread(descriptor, layout.PAGE_BYTES, 0)
        after = os.pread(descriptor, _SLOTS_BYTES, layout.SLOTS_AT)
    except OSError as error:
        raise PageError(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if min(len(data) - layout.PAGE_BYTES, *(len(part) - _SLOTS_BYTES for part in (earlier, slots, later, after))) < 0:
        raise PageError(f"{path}: {len(data)} bytes long, a rank page has {layout.PAGE_BYTES}")
    return data, (earlier, slots, later), after


def _parse_header(path: Path, data: bytes) -> tuple[int | bytes, ...]:
    header: tuple[int | bytes, ...] = layout.HEADER.unpack_from(data)
    if header[0] != layout.MAGIC:
        raise PageError(f"{path}: not a rank page")
    if header[1] != layout.MAJOR:
        raise PageError(
            f"{path}: layout version {header[1]!r}, this opsd reads version {layout.MAJOR}; "
            "use the same opsd release in the job and on the node"
        )
    if layout.CRC.unpack_from(data, layout.HEADER.size)[0] != zlib.crc32(data[: layout.HEADER.size]):
        raise PageError(f"{path}: the header does not match its checksum")
    return header


def _newest_slot(earlier: bytes, slots: bytes, later: bytes) -> tuple[int, ...] | None:
    """The newest intact slot: complete before ``earlier`` was read, and not being rewritten when ``later`` was.

    The two sequence numbers within one read do not prove that: the writer runs while the bytes are copied.
    """
    whole = []
    for at in (0, layout.SLOT_STRIDE):
        slot = layout.SLOT.unpack_from(slots, at)
        written, begun = layout.SLOT.unpack_from(earlier, at)[-1], layout.SLOT.unpack_from(later, at)[0]
        if slot[0] and written == slot[0] == slot[-1] == begun and slot[1] < len(PHASES) and slot[2] < len(STATES):
            whole.append(slot)
    return max(whole, default=None)


def _count(slots: bytes) -> int:
    """The least number of steps that the page has."""
    found = [layout.SLOT.unpack_from(slots, at) for at in (0, layout.SLOT_STRIDE)]
    return max((int(slot[4]) for slot in found if slot[0] == slot[-1]), default=0)


def _decode_steps(
    data: bytes, minor: int, count: int, known: RankPage | None, reached: int
) -> tuple[tuple[StepRecord, ...], int]:
    """The steps in the ring of a page with ``count`` steps, and the total of tokens; ``known`` is of the same page.

    Records that the step after ``reached`` overwrites may have been overwritten during the read and are left out.
    """
    oldest = max(1, reached - layout.RING_STEPS + 2)
    records: list[StepRecord] = []
    decoded, tokens = 0, 0
    if known is not None and oldest <= known.steps_reported <= count:
        decoded, tokens = known.steps_reported, known.tokens
        records += known.steps[oldest - decoded - 1 :]
    for number in range(max(oldest, decoded + 1), count + 1):
        at = layout.RING_AT + (number - 1) % layout.RING_STEPS * layout.STEP_STRIDE
        begun, step, end, duration, step_tokens, tokens, loss, norm, *phases, ended, rate, gpu_ns = (
            layout.STEP.unpack_from(data, at)
        )
        if begun != number or ended != number:
            continue
        phase_s = tuple(ns / 1e9 for ns in phases)
        if minor < _LEARNING_RATE_SINCE:
            rate = math.nan
        records.append(
            StepRecord(
                step,
                end / 1e9,
                duration / 1e9,
                step_tokens,
                loss,
                norm,
                phase_s,
                None if math.isnan(rate) else rate,
                gpu_ns / 1e9 if minor >= _GPU_SINCE else 0.0,
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
    workers = (
        layout.WORKER.unpack_from(data, layout.WORKERS_AT + i * layout.WORKER.size) for i in range(layout.MAX_WORKERS)
    )
    flops_per_token, peak_flops = layout.MODEL.unpack_from(data, layout.MODEL_AT)
    source = min(layout.SOURCE.unpack_from(data, layout.SOURCE_AT)[0], len(SOURCES) - 1)
    known_place, *place = layout.PLACE.unpack_from(data, layout.PLACE_AT)
    planned: int = layout.PLANNED.unpack_from(data, layout.PLANNED_AT)[0]
    router = layout.ROUTER.unpack_from(data, layout.ROUTER_AT)
    request = min(layout.CONTROL.unpack_from(data, layout.CONTROL_AT)[0], len(REQUESTS) - 1)
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
        source=SOURCES[source],
        place=(place[0], place[1], place[2], place[3]) if known_place else None,
        planned=planned or None,
        relative=number(2) >= _RELATIVE_SINCE and bool(layout.RELATIVE.unpack_from(data, layout.RELATIVE_AT)[0]),
        router=router if router[0] > 0 and all(map(math.isfinite, router)) else None,
    )  # fmt: skip


def process_runs(pid: int, start: int) -> bool:
    """Whether this process is running; a zombie is not."""
    fields = layout.stat_fields(pid, "/proc")
    return fields is not None and int(fields[19]) == start and fields[0] not in ("Z", "X")


def process_state(page: RankPage, proc: str = "/proc") -> str | None:
    """The kernel's state letter of the rank's process (R, S, D, T, Z …), or None if it is gone or its pid is reused."""
    fields = layout.stat_fields(page.pid, proc)
    if fields is None or int(fields[19]) != page.pid_start:
        return None
    return fields[0]


def state_of(pid: int, proc: str = "/proc") -> str | None:
    """The kernel's state letter of a process, None if there is none."""
    fields = layout.stat_fields(pid, proc)
    return fields[0] if fields else None


def page_writer(path: Path, *, folder: int | None = None) -> tuple[int, int]:
    """Pid and start time of the process that writes the page at ``path``, as in ``read_page``. Raises PageError."""
    try:
        descriptor = _open(path, folder)
        try:
            data = os.pread(descriptor, layout.HEADER.size + layout.CRC.size, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) < layout.HEADER.size + layout.CRC.size:
        raise PageError(f"{path}: {len(data)} bytes long, a rank page has {layout.PAGE_BYTES}")
    header = _parse_header(path, data)
    return int(header[9]), int(header[10])
