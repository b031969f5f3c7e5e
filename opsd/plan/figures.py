"""The numbers that a plan is made with, each with its source; what a cluster has measured can take their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Self


class Figure(NamedTuple):
    """A number and where it is from. ``measured`` on this cluster: then ``file`` has it, of ``date`` (YYYY-MM-DD)."""

    value: float
    unit: str
    source: str
    measured: bool = False
    file: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """All fields are figures."""

    def figures(self) -> dict[str, Figure]:
        """All of them by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def given(self, others: Mapping[str, Figure]) -> Self:
        """With others in place of some; names that are not among its own are left out."""
        return replace(self, **{name: figure for name, figure in others.items() if name in self.figures()})
