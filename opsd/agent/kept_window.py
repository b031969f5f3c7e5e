"""The window as it is kept for the next agent, which then compares with the same minutes.

It goes into the journal when the agent stops. It is written to shared memory every few seconds, for the case that the
agent is killed. systemd keeps that folder until the service is stopped, and a full or slow disk delays nothing.
A series gets its past back when its collector delivers it again. The times are those of the monotonic clock, so only an
agent of the same boot can use them. The time without an agent is a gap, as with a blind collector.
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opsd.agent.window import Ring, Window

MAX_BYTES = 64 << 20
"""Unpacked; 27,000 series of 600 ticks. A larger window is not kept: both would not fit into the agent's memory."""
MAX_SAVED_BYTES = 16 << 20
"""In the memory of the machine, which counts as the agent's; 6,700 series of 600 ticks."""
SAVE_S = 8.0
_FILE = "window"
_LEVEL = 1
_ITEM = array("f").itemsize


class KeptWindowError(ValueError):
    """The kept window is of another release or another tick length; the message says which."""


def pack(window: Window, most: int = MAX_BYTES, level: int = _LEVEL) -> bytes:
    """The series of ``window`` and their times, to be read again by ``unpack``; b"" if they are more than ``most``.

    Also b"" before the first tick. ``level`` is that of zlib; with 0 nothing is compressed.
    """
    rings = [*window.rings()]
    rest = window.past.rest if window.past is not None else {}
    size = ((len(rings) + len(rest)) * _ITEM + window.times.itemsize) * window.ticks
    if window.tick < 0 or size > most * 7 // 8:  # the rest is for the names
        return b""
    head = {
        "tick": window.tick,
        "now": window.now,
        "ticks": window.ticks,
        "series": [
            *([told, r.metric.name, *r.values_of, r.base, r.limit, r.tick, r.changed, r.value] for told, r in rings),
            *([*of, *numbers] for of, (numbers, _) in rest.items()),
        ],
    }
    packer = zlib.compressobj(level)
    first = json.dumps(head).encode()
    parts = [packer.compress(len(first).to_bytes(8, "little") + first), packer.compress(window.times.tobytes())]
    parts += [packer.compress(ring.offsets.tobytes()) for _, ring in rings]
    parts += [packer.compress(offsets) for _, offsets in rest.values()]
    return b"".join((*parts, packer.flush()))


class Past:
    """The series of an earlier agent, each of which is given back once; ``now`` is its last monotonic second.

    ``rest`` has those that have not been given back, by what they are of: their numbers and their offsets.
    """

    def __init__(
        self, tick: int, now: float, times: array[float], series: dict[tuple[object, ...], tuple[Any, ...]]
    ) -> None:
        self.tick, self.now, self.times, self.rest = tick, now, times, series

    def give(self, ring: Ring, *, told: bool) -> None:
        """Let ``ring``, which is new, go on where the same series ended."""
        known = self.rest.pop((told, ring.metric.name, *ring.values_of), None)
        if known is not None:
            (ring.base, ring.limit, ring.tick, ring.changed, ring.value), offsets = known
            ring.offsets = array("f")
            ring.offsets.frombytes(offsets)


def unpack(kept: bytes, ticks: int, now: float) -> Past:
    """The window that ``pack`` has packed, with as many ``ticks``, at the monotonic second ``now``.

    Raises KeptWindowError.
    """
    try:
        unpacker = zlib.decompressobj()
        content = memoryview(unpacker.decompress(kept, MAX_BYTES))
        size = int.from_bytes(content[:8], "little")
        head = json.loads(bytes(content[8 : 8 + size]))
        times = array("d")
        at = 8 + size + ticks * times.itemsize
        times.frombytes(content[8 + size : at])
        series = dict(_series(head["series"], content[at:], ticks))
        tick, last, of = int(head["tick"]), float(head["now"]), head["ticks"]
    except (zlib.error, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise KeptWindowError("the kept window cannot be read") from error
    if of != ticks or not last <= now or tick < 0:
        raise KeptWindowError("the kept window has other ticks, or is of another boot")
    return Past(tick, last, times, series)


def newest(kept: Iterable[bytes], ticks: int, now: float) -> Past | None:
    """The newest of several windows; None if there is none. Raises KeptWindowError if none can be used."""
    found, error = [], None
    for content in filter(None, kept):
        try:
            found.append(unpack(content, ticks, now))
        except KeptWindowError as unusable:
            error = unusable
    if error is not None and not found:
        raise error
    return max(found, key=lambda past: past.now, default=None)


class SavedWindow:
    """The window in a folder in memory, for the next agent if this one is killed; without a ``folder`` nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / _FILE if folder is not None else None
        self._next = -math.inf

    def read(self) -> bytes:
        """The window that the last agent has saved; b"" without one."""
        with suppress(OSError):
            if self._path is not None and self._path.lstat().st_size <= MAX_BYTES:
                return self._path.read_bytes()
        return b""

    def save(self, window: Window) -> None:
        """Save ``window``, if the last time is ``SAVE_S`` ago. Raises OSError."""
        if self._path is None or window.now < self._next:
            return
        self._next = window.now + SAVE_S
        draft = self._path.with_name(f".{_FILE}.draft")
        draft.write_bytes(pack(window, MAX_SAVED_BYTES, level=0))
        draft.replace(self._path)


def _series(
    heads: list[list[Any]], offsets: memoryview, ticks: int
) -> Iterator[tuple[tuple[object, ...], tuple[Any, ...]]]:
    size = ticks * _ITEM
    for number, (*name, base, limit, tick, changed, value) in enumerate(heads):
        part = offsets[number * size : (number + 1) * size]
        if len(part) != size or not math.isfinite(base):
            raise ValueError("series and values differ")
        yield tuple(name), ((float(base), float(limit), int(tick), int(changed), float(value)), part)
