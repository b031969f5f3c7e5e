"""The numbers that a plan is made with, each with its source; what a cluster has measured can take their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple, Self


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


class Spec(NamedTuple):
    """Dense bf16 and fp8 FLOP/s and memory bandwidth in bytes per second; fp8 is 0 where the GPU has none."""

    bf16: float
    fp8: float
    memory: float


_BY_NAME: Final = (
    ("GH200", Spec(989.4e12, 1978.9e12, 4.0e12)),
    ("H200", Spec(989.4e12, 1978.9e12, 4.8e12)),
    ("H100 PCIe", Spec(756e12, 1513e12, 2.04e12)),
    ("H100 NVL", Spec(835e12, 1671e12, 3.94e12)),
    ("H100", Spec(989.4e12, 1978.9e12, 3.35e12)),
    ("H800", Spec(989.4e12, 1978.9e12, 3.35e12)),
    ("B200", Spec(2250e12, 4500e12, 8.0e12)),
    ("A100-SXM4-80GB", Spec(312e12, 0.0, 2.039e12)),
    ("A100 80GB PCIe", Spec(312e12, 0.0, 1.935e12)),
    ("A100", Spec(312e12, 0.0, 1.555e12)),
    ("L40S", Spec(362e12, 733e12, 0.864e12)),
)


def spec_of(model: str) -> Spec | None:
    """The data sheet of the GPU model ``model``, None if unknown. The first match counts."""
    return next((spec for name, spec in _BY_NAME if name in model), None)


@dataclass(frozen=True, slots=True)
class Parts:
    """All fields are parts in one unit."""

    @property
    def parts(self) -> dict[str, float]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> float:
        return sum(self.parts.values())
