"""Notes which environment variables are read while a standby imports: what it has read it must not see change.

Loaded by path into the rank's interpreter, as ``worker.py`` is: standard library only.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

_MAPPING = frozenset(["os", "collections.abc", "_collections_abc"])
"""Modules through whose functions everybody reads the environment."""
_PASSING_ON = frozenset(["subprocess", "ctypes.util"])
"""Modules that copy the environment for a process they start."""


class EnvironmentReads:
    """The variables out of ``names`` that are read from ``os.environ`` within the ``with`` block.

    Who takes all of them at once, to look for a prefix as tqdm and fsspec do, reads those whose values it uses or
    keeps. What native code asks the C library for is not seen.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {os.fsencode(name): name for name in names}
        self._used: set[str] = set()
        self._handed_out: list[tuple[str, weakref.ref[_Value]]] = []
        self._scan: _Place | None = None

    def __enter__(self) -> EnvironmentReads:
        environ: Any = os.environ
        self._plain = environ._data
        environ._data = os.environb._data = _Variables(self._plain, self)  # type: ignore[attr-defined]
        return self

    def __exit__(self, *exc: object) -> None:
        environ: Any = os.environ
        now = dict(environ._data.items())
        self._plain.clear()
        self._plain.update(now)
        environ._data = os.environb._data = self._plain  # type: ignore[attr-defined]

    @property
    def names(self) -> list[str]:
        """What has been read so far."""
        kept = {name for name, value in self._handed_out if value() is not None}
        return sorted(self._used | kept)

    def scanned(self, reader: FrameType) -> None:
        """``reader`` goes through all variables."""
        place, _, _ = _place(reader)
        self._scan = place

    def note(self, key: bytes, value: bytes | None, reader: FrameType) -> bytes | None:
        """``key`` is read by ``reader``; returns the value to hand out."""
        name = self._names.get(key)
        if name is None:
            return value
        place, within_loop, passes_on = _place(reader)
        if passes_on:
            return value
        if value is not None and (within_loop or place == self._scan):
            return _Encoded(value, lambda text: self._hand_out(name, text))
        self._used.add(name)
        return value

    def _hand_out(self, name: str, text: str) -> str:
        value = _Value(text)
        value.use = lambda: self._used.add(name)
        self._handed_out.append((name, weakref.ref(value)))
        return value


_Place = tuple[int, int]
"""An instruction of a frame; ``dict(os.environ)`` goes through all names and asks for their values in one."""


def _place(reader: FrameType) -> tuple[_Place, bool, bool]:
    """Who reads, past the functions that everybody does it with; whether in ``items()`` or ``values()``; to pass on."""
    within_loop = False
    frame: FrameType | None = reader
    while frame is not None and frame.f_globals.get("__name__") in _MAPPING:
        within_loop |= frame.f_code.co_name == "__iter__"
        frame = frame.f_back
    if frame is None:
        return (0, 0), within_loop, False
    return (id(frame), frame.f_lasti), within_loop, frame.f_globals.get("__name__") in _PASSING_ON


class _Variables(dict[bytes, bytes]):
    """What ``os.environ`` holds, telling who asks for one."""

    def __init__(self, data: dict[bytes, bytes], reads: EnvironmentReads) -> None:
        super().__init__(data)
        self._reads = reads

    def __iter__(self) -> Iterator[bytes]:
        self._reads.scanned(sys._getframe(1))
        return super().__iter__()

    def __getitem__(self, key: bytes) -> bytes:
        value = self._reads.note(key, self.get(key), sys._getframe(1))
        if value is None:
            raise KeyError(key)
        return value


class _Value(str):
    """A value of which can be told whether somebody keeps it, and that tells when it is used."""

    use: Callable[[], None]

    def __getattribute__(self, name: str) -> Any:
        if name != "use":
            self.use()
        return super().__getattribute__(name)

    def __int__(self) -> int:
        return int(str(self))

    def __float__(self) -> float:
        return float(str(self))

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _tell(name: str) -> Any:
    plain = getattr(str, name)

    def method(self: _Value, *args: Any) -> Any:
        self.use()
        return plain(self, *args)

    return method


for _name in ("__str__", "__format__", "__add__", "__eq__", "__hash__", "__len__", "__getitem__", "__contains__"):
    setattr(_Value, _name, _tell(_name))


class _Encoded(bytes):
    """A value that tells when it is decoded, and by what to hand it out."""

    _hand_out: Callable[[str], str]

    def __new__(cls, value: bytes, hand_out: Callable[[str], str]) -> _Encoded:
        encoded = super().__new__(cls, value)
        encoded._hand_out = hand_out
        return encoded

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._hand_out(super().decode(encoding, errors))
