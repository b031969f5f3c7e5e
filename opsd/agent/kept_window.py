"""The window as it is kept on the disk when the agent stops, so that the next one compares with the same minutes.

A series gets its past back when its collector delivers it again. The times are those of the monotonic clock, so that
only an agent of the same boot goes on with them; the time without an agent is a gap, as with a blind collector.
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opsd.agent.window import Ring, Window

MAX_BYTES = 64 << 20
"""Unpacked; 27,000 series of 600 ticks. A larger window is not kept: both would not fit into the agent's memory."""
_LEVEL = 1
_ITEM = array("f").itemsize


class KeptWindowError(ValueError):
    """What was kept is no window of this release, or of other ticks; the message says which."""


def pack(window: Window) -> bytes:
    """The series of ``window`` and their times, to be read again by ``unpack``; b"" if they are too large."""
    rings = [*window.rings()]
    if (len(rings) * _ITEM + window.times.itemsize) * window.ticks > MAX_BYTES * 7 // 8:  # the rest is for the names
        return b""
    head = {
        "tick": window.tick,
        "now": window.now,
        "ticks": window.ticks,
        "series": [
            [told, r.metric.name, *r.values_of, r.base, r.limit, r.tick, r.changed, r.value] for told, r in rings
        ],
    }
    packer = zlib.compressobj(_LEVEL)
    first = json.dumps(head).encode()
    parts = [packer.compress(len(first).to_bytes(8, "little") + first), packer.compress(window.times.tobytes())]
    parts += [packer.compress(ring.offsets.tobytes()) for _, ring in rings]
    return b"".join((*parts, packer.flush()))


class Past:
    """The series of an earlier agent, each of which is given back once."""

    def __init__(self, tick: int, times: array[float], series: dict[tuple[object, ...], tuple[Any, ...]]) -> None:
        self.tick, self.times, self._series = tick, times, series

    def give(self, ring: Ring, *, told: bool) -> None:
        """Let ``ring``, which is new, go on where the same series ended."""
        known = self._series.pop((told, ring.metric.name, *ring.values_of), None)
        if known is not None:
            (ring.base, ring.limit, ring.tick, ring.changed, ring.value), offsets = known
            ring.offsets = array("f")
            ring.offsets.frombytes(offsets)


def unpack(kept: bytes, ticks: int, now: float) -> Past:
    """What ``pack`` has made, for a window of as many ``ticks`` at the monotonic second ``now``.

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
    return Past(tick, times, series)


def _series(
    heads: list[list[Any]], offsets: memoryview, ticks: int
) -> Iterator[tuple[tuple[object, ...], tuple[Any, ...]]]:
    size = ticks * _ITEM
    for number, (*name, base, limit, tick, changed, value) in enumerate(heads):
        part = offsets[number * size : (number + 1) * size]
        if len(part) != size or not math.isfinite(base):
            raise ValueError("series and values differ")
        yield tuple(name), ((float(base), float(limit), int(tick), int(changed), float(value)), part)
