"""The state that layers of attention keep of earlier tokens, so that later ones can be read alone."""

from __future__ import annotations

import torch
from torch import nn


class Cache:
    """The keys and values of a model's layers, or the latents that they are computed from.

    For evaluations of a model that is whole on one device, without layers that have a state.
    """

    def __init__(self, kept: dict[nn.Module, tuple[torch.Tensor, ...]] | None = None, length: int = 0) -> None:
        self._kept = kept or {}
        self.length = length
        """Tokens that were read."""

    def extend(self, layer: nn.Module, new: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The state of ``layer`` for all tokens, with the ``new`` ones, each [.., tokens, channels]."""
        if kept := self._kept.get(layer):
            new = tuple(torch.cat(parts, dim=-2) for parts in zip(kept, new, strict=True))
        self._kept[layer] = new
        return new

    def branch(self) -> Cache:
        """One that goes on from here by itself, and shares what was read so far."""
        return Cache(dict(self._kept), self.length)
