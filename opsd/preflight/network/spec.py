"""The messages between the processes of a network check, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pattern = Literal["pairs", "ring", "permutations", "incast", "collective"]


@dataclass(frozen=True, slots=True)
class Spec:
    """One measurement by a group of nodes.

    ``members`` are node numbers in rank order. ``size`` is in bytes: of a message for the patterns, in total for a
    collective. ``name`` is the collective. Each node has so many ``processes``. It runs for ``seconds`` and at least
    ``iterations``, and is ended after ``deadline_s``.
    """

    test: int
    members: tuple[int, ...]
    pattern: Pattern
    size: int
    iterations: int
    seconds: float
    deadline_s: float
    backend: str = "gloo"
    name: str = ""
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """A node's result of a test: seconds per iteration, of its slowest exchange, or why it failed."""

    test: int
    node: int
    seconds: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Joined:
    """A participating node and how many processes it could have: one per GPU, or one without (``backend`` gloo)."""

    node: int
    name: str
    processes: int
    version: str
    backend: str = "gloo"
