"""Mamba-2 (arXiv 2405.21060): states that decay, computed by products of matrices (SSD).

In the words of the paper: queries are C, keys B, values x, the gate z, ``skip`` is D, and A is minus the rate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from opsd.trainer.local import local
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.recurrent import Decays, Recurrent, chunked, joined


class Mamba(Recurrent):
    """Its output is gated, then normalised over the heads that share queries and keys."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.skip = nn.Parameter(torch.ones(settings.state_heads))
        self.norm = GroupNorm(settings.state_value_width, settings.state_shared_by, settings.norm_eps)

    def mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: torch.Tensor, decays: Decays, x: torch.Tensor
    ) -> torch.Tensor:
        """See ``Recurrent``; values also pass the state by."""
        return state_space(q, k, v * steps[..., None], decays) + local(self.skip).float()[:, None] * v

    def gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See ``Recurrent``."""
        normalised: torch.Tensor = self.norm(y * F.silu(gate))
        return normalised


class GroupNorm(nn.Module):
    """RMSNorm over the channels of ``heads`` at a time, with weights for all ``channels``."""

    def __init__(self, channels: int, heads: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self._heads, self._eps = heads, eps

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """``y`` [batch, sequence, heads, channels] to the same shape."""
        groups = y.view(*y.shape[:2], -1, self._heads, y.shape[-1])
        return F.rms_norm(groups, groups.shape[-2:], None, self._eps).view_as(y) * local(self.weight).view(y.shape[2:])


def state_space(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: Decays) -> torch.Tensor:
    """Read by ``q`` what the state S has after S = decay S + k v.

    ``q`` and ``k`` are [batch, sequence, heads, key_dim], ``v`` and the result [batch, sequence, heads, value_dim].
    """
    length = v.shape[1]
    q, k, v = chunked(q), chunked(k), chunked(v)
    added = (k * decays.within[..., -1, :, None]).mT @ v
    state, before = torch.zeros_like(added[:, :, 0]), []
    for chunk in range(k.shape[2]):
        before.append(state)
        state = state * decays.since[:, :, chunk, -1, None, None] + added[:, :, chunk]
    within = ((q @ k.mT) * decays.within) @ v
    return joined(within + (q * decays.since[..., None]) @ torch.stack(before, dim=2), length)
