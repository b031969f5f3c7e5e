"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are computed from one latent of ``kv_rank`` channels, and queries from one of
``query_rank`` channels if that is not 0. Of each head ``rope_dim`` channels have positions; all heads share their keys.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from opsd.trainer.attention import AttentionInputs, attend
from opsd.trainer.model_settings import LayerKind, ModelSettings

LATENT_EPS: Final = 1e-6
"""Epsilon of the latents' RMSNorm, which DeepSeek's models do not let their configuration change."""


class LatentAttention(nn.Module):
    """Causal self-attention within documents, with queries, keys and values of low rank."""

    def __init__(self, settings: ModelSettings, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        self.softcap = settings.attention_softcap
        self.kv_rank, self.rope_dim, self.value_dim = settings.kv_rank, settings.rope_dim, settings.value_channels
        self.nope_dim = settings.head_channels - settings.rope_dim
        width, heads, rank = settings.width, settings.heads, settings.query_rank
        if rank:
            self.query_down = nn.Linear(width, rank, bias=settings.qkv_bias)
            self.query_norm = nn.RMSNorm(rank, LATENT_EPS)
            self.query_up = nn.Linear(rank, settings.attention_width, bias=False)
        else:
            self.query = nn.Linear(width, settings.attention_width, bias=False)
        self.kv_down = nn.Linear(width, self.kv_rank + self.rope_dim, bias=settings.qkv_bias)
        self.kv_norm = nn.RMSNorm(self.kv_rank, LATENT_EPS)
        self.kv_up = nn.Linear(self.kv_rank, heads * (self.nope_dim + self.value_dim), bias=False)
        self.shared_key = nn.Identity()
        self.output = nn.Linear(heads * self.value_dim, width, bias=settings.output_bias)

    def forward(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """``x`` [batch, sequence, width] to the same shape."""
        q = self.query(x) if hasattr(self, "query") else self.query_up(self.query_norm(self.query_down(x)))
        latent, shared = self.kv_down(x).split((self.kv_rank, self.rope_dim), dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (-1, self.nope_dim + self.value_dim))
        k, v = kv.split((self.nope_dim, self.value_dim), dim=-1)
        q, q_rotary = q.unflatten(-1, (-1, self.nope_dim + self.rope_dim)).split((self.nope_dim, self.rope_dim), dim=-1)
        k_rotary = self.shared_key(shared)[:, :, None]
        if not self.kind.startswith("nope"):
            q_rotary, k_rotary = (inputs.rotate(halves(part), self.kind) for part in (q_rotary, k_rotary))
        q = torch.cat((q, q_rotary), dim=-1)
        k = torch.cat((k, k_rotary.expand(-1, -1, k.shape[2], -1)), dim=-1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = attend(q, k, v, inputs.mask_of(self.kind), inputs.context, inputs.scale, self.softcap)
        output: torch.Tensor = self.output(y.transpose(1, 2).flatten(2))
        return output


def halves(x: torch.Tensor) -> torch.Tensor:
    """DeepSeek rotates pairs of neighbouring channels; in this order they are the pairs that ``rotate`` takes."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
