"""Notes which environment variables are read while a standby imports: what it has read it must not see change.

Loaded by path into the rank's interpreter, as ``worker.py`` is: standard library only.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

_MAPPING = frozenset(["os", "collections.abc", "_collections_abc"])
"""Modules through whose functions everybody reads the environment."""
_PASSING_ON = frozenset(["subprocess", "ctypes.util"])
"""Modules that copy the environment for a process they start."""


class Reads:
    """The variables out of ``names`` that are read from ``os.environ`` within the ``with`` block.

    Who goes through all of them, looking for a prefix of its own as tqdm does, reads those whose values it keeps. What
    native code asks the C library for is not seen.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {os.fsencode(name): name for name in names}
        self._direct: set[str] = set()
        self._passing: list[tuple[str, weakref.ref[_Value]]] = []

    def __enter__(self) -> Reads:
        environ: Any = os.environ
        self._plain = environ._data
        environ._data = os.environb._data = _Variables(self._plain, self)  # type: ignore[attr-defined]
        return self

    def __exit__(self, *exc: object) -> None:
        environ: Any = os.environ
        now = dict(environ._data)
        self._plain.clear()
        self._plain.update(now)
        environ._data = os.environb._data = self._plain  # type: ignore[attr-defined]

    @property
    def names(self) -> list[str]:
        """What has been read so far."""
        kept = {name for name, value in self._passing if value() is not None}
        return sorted(self._direct | kept)

    def note(self, key: bytes, value: bytes | None, reader: FrameType) -> bytes | None:
        """``key`` is read by ``reader``; returns the value to hand out."""
        name = self._names.get(key)
        if name is None:
            return value
        among_all = False
        frame: FrameType | None = reader
        while frame is not None and frame.f_globals.get("__name__") in _MAPPING:
            among_all |= frame.f_code.co_name == "__iter__"
            frame = frame.f_back
        if frame is not None and frame.f_globals.get("__name__") in _PASSING_ON:
            return value
        if among_all and value is not None:
            return _Encoded(value, lambda text: self._passing.append((name, weakref.ref(text))))
        self._direct.add(name)
        return value


class _Variables(dict[bytes, bytes]):
    """What ``os.environ`` holds, telling who asks for one."""

    def __init__(self, data: dict[bytes, bytes], reads: Reads) -> None:
        super().__init__(data)
        self._reads = reads

    def __getitem__(self, key: bytes) -> bytes:
        value = self._reads.note(key, self.get(key), sys._getframe(1))
        if value is None:
            raise KeyError(key)
        return value


class _Value(str):
    """A value of which can be told whether somebody keeps it."""


class _Encoded(bytes):
    """A value that tells whom it is decoded for."""

    _handed_out: Any

    def __new__(cls, value: bytes, handed_out: Any) -> _Encoded:
        encoded = super().__new__(cls, value)
        encoded._handed_out = handed_out
        return encoded

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        text = _Value(super().decode(encoding, errors))
        self._handed_out(text)
        return text
