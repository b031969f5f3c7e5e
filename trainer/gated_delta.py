"""Gated DeltaNet (arXiv 2412.06464): a token replaces what the state has for its key, instead of adding to it."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.recurrent import Decays, Recurrent, chunked, joined

LENGTH_EPS: Final = 1e-6
"""Added to the squared length of queries and keys, as in flash-linear-attention."""


class GatedDeltaNet(Recurrent):
    """Its output is normalised by head, then gated, as in Qwen3-Next."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.write = nn.Linear(settings.width, settings.state_heads, bias=False)
        self.norm = nn.RMSNorm(settings.state_value_dim, settings.norm_eps)

    def mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: torch.Tensor, decays: Decays, x: torch.Tensor
    ) -> torch.Tensor:
        """See ``Recurrent``; the share of the state that is replaced has a projection of its own."""
        shares = self.write(x).float().sigmoid()
        return gated_delta_rule(_of_length_1(q) * q.shape[-1] ** -0.5, _of_length_1(k), v, shares, decays)

    def gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See ``Recurrent``."""
        normalised: torch.Tensor = self.norm(y)
        return normalised * F.silu(gate)


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shares: torch.Tensor, decays: Decays
) -> torch.Tensor:
    """Read by ``q`` what the state S has after S = decay S + share k (v - k decay S) (equation 10 there).

    ``q`` and ``k`` are [batch, sequence, heads, key_dim], ``v`` and the result [batch, sequence, heads, value_dim],
    ``shares`` [batch, sequence, heads]. What the tokens of a chunk write depends on earlier ones: a triangular system.
    """
    length, size = v.shape[1], v.shape[-1]
    q, k, v, share = chunked(q), chunked(k), chunked(v), chunked(shares)[..., None]
    since = decays.since[..., None]
    system = share * (k @ k.mT) * decays.within
    wanted = torch.cat((share * v, share * k * since), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    written, replaced = solved.split((size, k.shape[-1]), dim=-1)
    scores, q = (q @ k.mT) * decays.within, q * since
    k = k * decays.within[..., -1, :, None]
    state = q.new_zeros(*k.shape[:2], k.shape[-1], size)
    outputs = []
    for chunk in range(k.shape[2]):
        new = written[:, :, chunk] - replaced[:, :, chunk] @ state
        outputs.append(q[:, :, chunk] @ state + scores[:, :, chunk] @ new)
        state = state * since[:, :, chunk, -1:] + k[:, :, chunk].mT @ new
    return joined(torch.stack(outputs, dim=2), length)


def _of_length_1(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)
