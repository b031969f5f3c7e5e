"""The decoder: grouped-query attention, RoPE with exempt layers, tied embeddings, RMSNorm, SwiGLU.

The default architecture is SmolLM3's; settings give others. Documents are packed into sequences, and a token attends to
its own document only.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from opsd.trainer.attention import AttentionInputs, Context, attend, attention_inputs, rotate
from opsd.trainer.loss import next_token_loss
from opsd.trainer.settings import ModelSettings


class Attention(nn.Module):
    """Causal self-attention within documents; ``rotary`` is off in layers without positions (NoPE).

    Layers without positions see their whole document even if others have a window.
    """

    def __init__(self, settings: ModelSettings, rotary: bool) -> None:
        super().__init__()
        width, kv_width = settings.width, settings.kv_heads * settings.head_dim
        self.head_dim = settings.head_dim
        self.rotary = rotary
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        if settings.qk_norm:
            self.query_norm = nn.RMSNorm(settings.head_dim, settings.norm_eps)
            self.key_norm = nn.RMSNorm(settings.head_dim, settings.norm_eps)
        self.normalised = settings.qk_norm

    def forward(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """``x`` [batch, sequence, width] to the same shape."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.query, self.key, self.value)
        )
        if self.normalised:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary:
            q, k = rotate(q, inputs.rotation), rotate(k, inputs.rotation)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = attend(q, k, v, inputs.window_mask if self.rotary else inputs.full_mask, inputs.context)
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

    def forward(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """``x`` [batch, sequence, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x), inputs)
        x = x + self.ffn(self.ffn_norm(x))
        return x  # noqa: RET504 -- one line for each half of the block


class Decoder(nn.Module):
    """The language model, or the ``layers`` of a pipeline stage.

    The first stage embeds the tokens and the last one computes the loss. Parameters have the same names in every stage.
    With tied embeddings the first and the last stage each have a copy of the embedding.
    """

    def __init__(self, settings: ModelSettings, layers: range | None = None) -> None:
        super().__init__()
        layers = range(settings.layers) if layers is None else layers
        self.settings = settings
        self.first, self.last = layers.start == 0, layers.stop == settings.layers
        self.context: Context = None
        self.loss = next_token_loss
        self.vocabulary: dist.ProcessGroup | None = None
        """The ranks over which the vocabulary of the logits is split; None if it is not split."""
        if self.first or (self.last and settings.tied):
            self.embedding = nn.Embedding(settings.vocab, settings.width)
        self.blocks = nn.ModuleDict({str(layer): Block(settings, has_rotary(layer, settings)) for layer in layers})
        if self.last:
            self.norm = nn.RMSNorm(settings.width, settings.norm_eps)
            self.head = nn.Linear(settings.width, settings.vocab, bias=False)
            self.tie()

    @property
    def shared(self) -> frozenset[str]:
        """Parameters of which another pipeline stage has a copy."""
        return frozenset({"embedding.weight"}) if self.settings.tied and self.first != self.last else frozenset()

    def tie(self) -> None:
        """Make the output projection share the embedding, if configured, after either got new storage."""
        if self.last and self.settings.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, x: torch.Tensor, documents: torch.Tensor, targets: torch.Tensor | None = None, z_loss: float = 0.0
    ) -> torch.Tensor:
        """Logits [batch, sequence, vocab], or the mean loss per token if ``targets`` are given.

        ``x`` and ``targets`` [batch, sequence] are token ids. ``documents`` [batch, sequence] numbers the document of
        each token within its row, of whole sequences even if they are split over ranks. Between pipeline stages ``x``
        and the result are activations [batch, sequence, width].
        """
        inputs = attention_inputs(documents, self.settings, self.context)
        if self.first:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, inputs)
        if not self.last:
            return x
        logits: torch.Tensor = self.head(self.norm(x))
        return logits if targets is None else self.loss(logits, targets, z_loss, self.vocabulary)


def has_rotary(layer: int, settings: ModelSettings) -> bool:
    """Whether ``layer``, counted from 0, has rotary positions: all but every ``nope_every``-th."""
    return settings.nope_every == 0 or (layer + 1) % settings.nope_every != 0


def count_parameters(settings: ModelSettings) -> int:
    """Number of parameters of the whole model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(settings).parameters())


def init_std(name: str, settings: ModelSettings) -> float:
    """Standard deviation of the initial values of the matrix ``name``.

    Matrices that write into the residual stream are scaled by 1/sqrt(2 * layers) (GPT-2) to keep its variance.
    """
    residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
    return settings.init_std / math.sqrt(2 * settings.layers) if residual else settings.init_std


def flops_per_token(parameters: int, settings: ModelSettings, sequence: int) -> float:
    """Forward and backward FLOP per token, attention counted in full: 6 N + 12 layers width sequence (PaLM, app. B)."""
    return 6.0 * parameters + 12.0 * settings.layers * settings.width * sequence
