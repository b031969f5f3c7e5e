"""JSON of users, which may be small and stand for objects that fill the memory: ``[],`` takes 80 bytes for three."""

from __future__ import annotations

import json
from typing import Any

_OBJECT, _LIST, _VALUE = 240, 80, 64
"""Bytes that CPython takes for a small dictionary, a list, and a place in one of them with its value."""


def estimate(text: str | bytes) -> int:
    """Bytes that the values in a JSON text take at most, roughly; without that of the text itself."""
    objects, lists, values = (
        (text.count(b"{"), text.count(b"["), text.count(b","))
        if isinstance(text, bytes)
        else (text.count("{"), text.count("["), text.count(","))
    )
    return objects * _OBJECT + lists * _LIST + values * _VALUE


def loads(text: str | bytes, most: int) -> Any:
    """The value, if it takes ``most`` bytes at most by the estimate. Raises ValueError."""
    if (size := estimate(text)) > most:
        raise ValueError(f"its values would take {size >> 20} MiB")
    return json.loads(text)
