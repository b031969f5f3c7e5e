"""A tensor of any checkpoint: its name, its shape, and how to read its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


class FormatError(ValueError):
    """Not a readable checkpoint; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored part of a tensor, beginning at ``offset``."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint.

    ``ranks`` is the number of tensor-parallel files that contain it, counted by its first dimension; 0 if it is whole.
    """

    name: str
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)
    ranks: int = 0

    def read(self) -> torch.Tensor:
        """The whole tensor."""
        if len(self.chunks) == 1 and self.chunks[0].shape == self.shape:
            return self.chunks[0].read()
        whole: torch.Tensor | None = None
        for chunk in self.chunks:
            part = chunk.read().reshape(chunk.shape)
            whole = torch.zeros(self.shape, dtype=part.dtype) if whole is None else whole
            whole[tuple(slice(at, at + n) for at, n in zip(chunk.offset, chunk.shape, strict=True))] = part
        assert whole is not None
        return whole
