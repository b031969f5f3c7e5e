"""Parameters, and the graphs of losses that depend on them, as autograd has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Parameter:
    """A tensor; torch counts what is written to it."""

    def __init__(self) -> None:
        self._version = 1

    def write(self) -> None:
        """As an optimizer does."""
        self._version += 1


@dataclass
class Accumulate:
    """The node at which a parameter's gradient ends."""

    variable: Parameter


class Loss:
    """A tensor that one operation has made of these parameters and of something that needs no gradient."""

    def __init__(self, *parameters: Parameter) -> None:
        self.next_functions: list[tuple[Any, int]] = [
            (None, 0),
            *((Accumulate(parameter), 0) for parameter in parameters),
        ]

    @property
    def grad_fn(self) -> Loss:
        """That operation."""
        return self
