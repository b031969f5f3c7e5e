"""What the processes of a network check tell each other, as JSON: data only, never code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pattern = Literal["pairs", "ring", "permutations", "incast", "collective"]


@dataclass(frozen=True, slots=True)
class Spec:
    """One measurement by a group of nodes.

    ``members`` are node numbers in the order of their ranks. ``size`` is in bytes: of a message for the patterns, in
    total for a collective. ``name`` is the collective. It goes on for ``seconds`` and at least ``iterations``; one
    that takes longer than ``deadline_s`` is ended.
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


@dataclass(frozen=True, slots=True)
class Done:
    """What one node says after a test: seconds per iteration, of its slowest exchange, or why it failed."""

    test: int
    node: int
    seconds: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Joined:
    """A node that takes part with so many processes: one per GPU, or one where there are none."""

    node: int
    name: str
    processes: int
    version: str
