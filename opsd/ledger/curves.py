"""The course of a run for charts: loss, throughput and step time over its wall clock, in a few hundred points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

POINTS = 240
NAMES = ("loss", "tokens_per_s", "step_s")

Curve = list[tuple[float, float]]
"""Epoch seconds and the mean of all steps around them."""


def curves(metrics: Iterable[Mapping[str, Any]], points: int = POINTS) -> dict[str, Curve]:
    """The curves by the names of ``NAMES``, without those of which nothing is known.

    ``metrics`` are lines of metrics.jsonl or steps.jsonl. Of steps that were done more than once each time counts. What
    is no finite number is left out.
    """
    lines = sorted(
        ((at, line) for line in metrics if (at := _number(line.get("t"))) is not None), key=lambda pair: pair[0]
    )
    found = {name: _thinned([(at, v) for at, line in lines if (v := _value(line, name)) is not None], points)
             for name in NAMES}  # fmt: skip
    return {name: curve for name, curve in found.items() if len(curve) > 1}


def _value(line: Mapping[str, Any], name: str) -> float | None:
    """Per step: a line of steps.jsonl has the seconds of several."""
    value = _number(line.get(name))
    count = _number(line.get("steps")) if name == "step_s" else None
    return value / count if value is not None and count else value


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _thinned(points: Sequence[tuple[float, float]], most: int) -> Curve:
    """At most ``most`` points: the mean of each of that many equal parts of the time."""
    if len(points) <= most:
        return [*points]
    began, width = points[0][0], (points[-1][0] - points[0][0]) / most or 1.0
    parts: dict[int, list[tuple[float, float]]] = {}
    for at, value in points:
        parts.setdefault(min(most - 1, int((at - began) / width)), []).append((at, value))
    return [
        (math.fsum(at for at, _ in part) / len(part), math.fsum(value for _, value in part) / len(part))
        for _, part in sorted(parts.items())
    ]
