"""Figures that are made up of parts, each a number with a name of its own."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Parts:
    """All fields are parts in one unit."""

    @property
    def parts(self) -> dict[str, float]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())
