"""What JSON of users takes in memory as values: ``[],`` takes 80 bytes for three."""

from __future__ import annotations

_OBJECT, _LIST, _VALUE = 240, 80, 64
"""Bytes that CPython takes for a small dictionary, a list, and a place in one of them with its value."""
_USUAL = 6
"""Times its own size that usual text takes."""


def weight(text: bytes) -> int:
    """The bytes of usual text that take as much as this: its own, or more if it is made of very small values."""
    values = text.count(b"{") * _OBJECT + text.count(b"[") * _LIST + text.count(b",") * _VALUE
    return max(len(text), values // _USUAL)
