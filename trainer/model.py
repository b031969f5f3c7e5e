"""The decoder: grouped-query attention, RoPE with layers left out, tied embeddings, RMSNorm, SwiGLU.

The shape is SmolLM3's. Documents are packed into sequences, and a token attends to its own document only.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config import ModelSettings
from trainer.loss import next_token_loss


class Attention(nn.Module):
    """Causal self-attention within documents; ``rotary`` is off in the layers that have no positions (NoPE)."""

    def __init__(self, settings: ModelSettings, rotary: bool) -> None:
        super().__init__()
        width, kv_width = settings.width, settings.kv_heads * settings.head_dim
        self.head_dim = settings.head_dim
        self.rotary = rotary
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``x`` [batch, sequence, width] to the same shape; see ``rotary_angles`` and ``document_mask``."""
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if self.rotary:
            q, k = rotate(q, angles), rotate(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        output: torch.Tensor = self.output(y.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate = nn.Linear(settings.width, settings.ffn, bias=False)
        self.up = nn.Linear(settings.width, settings.ffn, bias=False)
        self.down = nn.Linear(settings.ffn, settings.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """One layer: attention and feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, settings: ModelSettings, rotary: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.width, settings.norm_eps)
        self.attention = Attention(settings, rotary)
        self.ffn_norm = nn.RMSNorm(settings.width, settings.norm_eps)
        self.ffn = FeedForward(settings)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles, mask)
        x = x + self.ffn(self.ffn_norm(x))
        return x  # noqa: RET504 -- one line for each half of the block


class Decoder(nn.Module):
    """The language model. The output projection is the embedding itself."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.vocab, settings.width)
        self.blocks = nn.ModuleList(Block(settings, has_rotary(layer, settings)) for layer in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width, settings.norm_eps)

    def forward(
        self, tokens: torch.Tensor, documents: torch.Tensor, targets: torch.Tensor | None = None, z_loss: float = 0.0
    ) -> torch.Tensor:
        """Logits [batch, sequence, vocab], or the mean loss per token where ``targets`` are given.

        ``tokens`` and ``targets`` [batch, sequence] are token ids, ``documents`` [batch, sequence] numbers the
        document of each token within its row.
        """
        angles = rotary_angles(tokens.shape[1], self.settings, tokens.device)
        mask = document_mask(documents) if self.settings.document_mask else None
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles, mask)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return logits if targets is None else next_token_loss(logits, targets, z_loss)


def has_rotary(layer: int, settings: ModelSettings) -> bool:
    """Whether ``layer``, counted from 0, has rotary positions: all but every ``nope_every``-th."""
    return settings.nope_every == 0 or (layer + 1) % settings.nope_every != 0


def rotary_angles(length: int, settings: ModelSettings, device: torch.device) -> torch.Tensor:
    """The cosines and sines [2, length, head_dim / 2] of RoPE (arXiv 2104.09864).

    Positions count through the whole sequence: attention depends on their differences only, so they need not start
    again with each document.
    """
    half = torch.arange(0, settings.head_dim, 2, device=device, dtype=torch.float32)
    frequencies = settings.rope_theta ** (-half / settings.head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of channels (i, i + head_dim / 2) of ``x`` [batch, heads, sequence, head_dim], as Llama does."""
    cos, sin = angles.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """Which key [.., k] a query [.., q, .] may see, bool [batch, 1, sequence, sequence]: its own document's past."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


def init_std(name: str, settings: ModelSettings) -> float:
    """Standard deviation of the initial values of the matrix ``name``.

    Matrices that write into the residual stream are scaled by 1/sqrt(2 * layers) (GPT-2) to keep its variance.
    """
    residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
    return settings.init_std / math.sqrt(2 * settings.layers) if residual else settings.init_std


def flops_per_token(parameters: int, settings: ModelSettings, sequence: int) -> float:
    """Forward and backward FLOP per token, attention counted in full: 6 N + 12 layers width sequence (PaLM, app. B)."""
    return 6.0 * parameters + 12.0 * settings.layers * settings.width * sequence
