"""The place of a parameter of ours in files of Hugging Face: a tensor, or some rows of one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Place:
    """The tensor ``name``; or of it, in ``groups`` equal groups of rows, those from ``begin`` to ``end`` out of ``of``.

    ``channels`` says that the rows are those of a convolution of single channels, which has another dimension.
    """

    name: str
    groups: int = 1
    begin: int = 0
    end: int = 0
    of: int = 0
    channels: bool = False

    @property
    def whole(self) -> bool:
        """Whether the parameter is the tensor."""
        return not self.of

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, for a parameter of ``shape``."""
        rows = self.groups * self.of
        return shape if self.whole else (rows, *([1] if self.channels and len(shape) > 1 else []), *shape[1:])

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter's rows of ``tensor``, sharing its memory: [groups, rows of a group, ..]."""
        if self.channels and tensor.dim() > 1:
            tensor = tensor.squeeze(1)
        return tensor.view(self.groups, self.of, *tensor.shape[1:])[:, self.begin : self.end]


def packed(name: str, parts: Iterable[tuple[str, int]], groups: int = 1, *, channels: bool = False) -> dict[str, Place]:
    """The places of parameters that follow each other in each group of rows of ``name``; ``parts`` has their rows."""
    ends, end = {}, 0
    for part, rows in parts:
        ends[part] = (end, end + rows)
        end += rows
    return {part: Place(name, groups, *span, end, channels) for part, span in ends.items()}
