"""Numbers in readable form."""

from __future__ import annotations

from typing import Final

_SCALED: Final = {
    "bytes_per_second": "B/s",
    "bytes": "B",
    "flops": "FLOP/s",
    "hertz": "Hz",
    "bits_per_second": "b/s",
    "tokens_per_second": "tokens/s",
    "operations_per_second": "IO/s",
}
_PLAIN: Final = {"celsius": "°C", "watts": "W", "ratio": "", "": ""}
_LARGE: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SHORT: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def quantity(value: float, unit: str) -> str:
    """``value`` in the base unit ``unit`` with three significant digits and a decimal prefix: "55.2 GB/s"."""
    if unit == "seconds":
        return duration(value)
    if unit == "ratio":
        return f"{value:.1%}"
    if unit in _SCALED:
        scale, prefix = next(((s, p) for s, p in _LARGE if abs(value) >= s), (1.0, ""))
        return f"{_digits(value / scale)} {prefix}{_SCALED[unit]}"
    return f"{_digits(value)} {_PLAIN.get(unit, unit)}".strip()


def duration(seconds: float) -> str:
    """A time span: "235 us", "1.5 s", "3 h 20 min", "16.1 d"."""
    if abs(seconds) < 60:
        if seconds == 0:
            return "0 s"
        scale, name = next(((s, n) for s, n in _SHORT if abs(seconds) >= s), _SHORT[-1])
        return f"{_digits(seconds / scale)} {name}"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    if seconds < 2 * 86_400:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    return f"{seconds / 86_400:.1f} d"


def _digits(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
