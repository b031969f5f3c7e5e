"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are computed from one latent of ``kv_rank`` channels, and queries from one of
``query_rank`` channels if that is not 0. Of each head ``rope_dim`` channels have positions; all heads share their keys.

A cache has the latents. A few tokens that follow many are computed with the latents themselves as keys and values.
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
        latent, key = self.kv_down(x).split((self.kv_rank, self.rope_dim), dim=-1)
        latent, key = self.kv_norm(latent), self.shared_key(key)
        q, turned = q.unflatten(-1, (-1, self.nope_dim + self.rope_dim)).split((self.nope_dim, self.rope_dim), dim=-1)
        turned, key = (inputs.rotate(halves(part), self.kind) for part in (turned, key[:, :, None]))
        latent, key = inputs.with_earlier(self, latent, key[:, :, 0])
        absorb = inputs.cache is not None and self.absorbing_pays(q.shape[1], key.shape[1])
        y = (self.absorbed if absorb else self.expanded)(q, turned, latent, key, inputs)
        output: torch.Tensor = self.output(y.flatten(2))
        return output

    def expanded(
        self, q: torch.Tensor, turned: torch.Tensor, latent: torch.Tensor, key: torch.Tensor, inputs: AttentionInputs
    ) -> torch.Tensor:
        """Attention with keys and values of each head, [batch, queries, heads, value_dim].

        ``q`` and ``turned`` [batch, queries, heads, ..] are the channels of queries without and with positions,
        ``latent`` [batch, tokens, kv_rank] and ``key`` [batch, tokens, rope_dim] what keys and values come from.
        """
        kv = self.kv_up(latent).unflatten(-1, (-1, self.nope_dim + self.value_dim))
        k, v = kv.split((self.nope_dim, self.value_dim), dim=-1)
        q = torch.cat((turned, q), dim=-1)
        k = torch.cat((key[:, :, None].expand(-1, -1, k.shape[2], -1), k), dim=-1)
        return self._attend(q, k, v, inputs)

    def absorbed(
        self, q: torch.Tensor, turned: torch.Tensor, latent: torch.Tensor, key: torch.Tensor, inputs: AttentionInputs
    ) -> torch.Tensor:
        """The same as ``expanded`` with its arguments, but latents are the keys and values of all heads.

        The matrices that expand them are multiplied with queries and results instead (section 2.1.2).
        """
        up = self.kv_up.weight.view(-1, self.nope_dim + self.value_dim, self.kv_rank)
        to_keys, to_values = up[:, : self.nope_dim], up[:, self.nope_dim :]
        q = torch.cat((turned, torch.einsum("bqhn,hnr->bqhr", q, to_keys)), dim=-1)
        k = torch.cat((key, latent), dim=-1)
        y = self._attend(q, k[:, :, None], latent[:, :, None], inputs)
        return torch.einsum("bqhr,hvr->bqhv", y, to_values)

    def absorbing_pays(self, queries: int, tokens: int) -> bool:
        """Whether ``absorbed`` has fewer products than ``expanded`` for so many queries to so many tokens."""
        matrix = self.kv_rank * (self.nope_dim + self.value_dim)
        expanded = tokens * matrix + queries * tokens * (self.rope_dim + self.nope_dim + self.value_dim)
        absorbed = queries * matrix + queries * tokens * (self.rope_dim + 2 * self.kv_rank)
        return absorbed < expanded

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attend(q, k, v, inputs.masks[self.kind], inputs.context, inputs.scale, self.softcap).transpose(1, 2)


def halves(x: torch.Tensor) -> torch.Tensor:
    """DeepSeek rotates pairs of neighbouring channels; in this order they are the pairs that ``rotate`` takes."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
