"""The decoder: grouped-query attention, RoPE, RMSNorm, gated feed-forward layers.

The default architecture is SmolLM3's; settings give those of Llama, Qwen, Gemma, Mistral,
OLMo and DeepSeek. Documents are packed
into sequences, and a token attends to its own document only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from opsd.trainer.attention import (
    AttentionInputs,
    Cache,
    Context,
    LatentAttention,
    attend,
    attention_inputs,
    within_documents,
)
from opsd.trainer.experts import Experts, FeedForward, MixtureOfExperts, Routing, local
from opsd.trainer.loss import LossTerms, linear_loss
from opsd.trainer.model_settings import LayerKind, ModelSettings
from opsd.trainer.recurrent import DRAWS, GatedDeltaNet, Mamba


class Attention(nn.Module):
    """Causal self-attention within documents; its kind says whether it has positions (RoPE), and what it sees."""

    def __init__(self, settings: ModelSettings, kind: LayerKind) -> None:
        super().__init__()
        width, kv_width = settings.attention_width, settings.kv_heads * settings.head_channels
        self.head_dim = settings.head_channels
        self.kind = kind
        self.softcap = settings.attention_softcap
        self.query = nn.Linear(settings.width, width, bias=settings.qkv_bias)
        self.key = nn.Linear(settings.width, kv_width, bias=settings.qkv_bias)
        self.value = nn.Linear(settings.width, kv_width, bias=settings.qkv_bias)
        self.gate = nn.Linear(settings.width, width, bias=settings.qkv_bias) if settings.attention_gate else None
        self.output = nn.Linear(width, settings.width, bias=settings.output_bias)
        self.norm_over = settings.qk_norm_over if settings.qk_norm else None
        if self.norm_over:
            channels = (self.head_dim, self.head_dim) if self.norm_over == "head" else (width, kv_width)
            self.query_norm, self.key_norm = (nn.RMSNorm(n, settings.norm_eps) for n in channels)

    def forward(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """``x`` [batch, sequence, width] to the same shape."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.norm_over == "all":
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (projected.unflatten(-1, (-1, self.head_dim)) for projected in (q, k, v))
        if self.norm_over == "head":
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = inputs.rotate(q, self.kind), inputs.rotate(k, self.kind)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = inputs.with_earlier(self, k, v)
        y = attend(q, k, v, inputs.masks[self.kind], inputs.context, inputs.scale, self.softcap)
        y = y.transpose(1, 2).flatten(2)
        output: torch.Tensor = self.output(y * self.gate(x).sigmoid() if self.gate else y)
        return output


class Block(nn.Module):
    """One layer: attention, or a state instead, and feed-forward, each added to the residual stream.

    Both are normalised before, after or both.
    """

    def __init__(self, settings: ModelSettings, layer: int, routing: Routing) -> None:
        super().__init__()

        def norm(*where: str) -> nn.Module | None:
            return nn.RMSNorm(settings.width, settings.norm_eps) if settings.norms in where else None

        self.attention_norm = norm("before", "both")
        self.attention = _mixer(settings, settings.kinds[layer])
        self.attention_post_norm = norm("after", "both")
        self.ffn_norm = norm("before", "both")
        dense = layer < settings.layers - settings.expert_layers
        self.ffn = FeedForward(settings, settings.ffn) if dense else MixtureOfExperts(settings, layer, routing)
        self.ffn_post_norm = norm("after", "both")

    def forward(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """``x`` [batch, sequence, width] to the same shape."""
        y = self.attention(self.attention_norm(x) if self.attention_norm else x, inputs)
        x = x + (self.attention_post_norm(y) if self.attention_post_norm else y)
        y = self.ffn(self.ffn_norm(x) if self.ffn_norm else x)
        x = x + (self.ffn_post_norm(y) if self.ffn_post_norm else y)
        return x  # noqa: RET504 -- a line of its own for each half


def _mixer(settings: ModelSettings, kind: LayerKind) -> nn.Module:
    """What lets tokens see earlier ones in a layer of this kind."""
    if kind == "delta":
        return GatedDeltaNet(settings)
    if kind == "mamba":
        return Mamba(settings)
    return (LatentAttention if settings.kv_rank else Attention)(settings, kind)


class Decoder(nn.Module):
    """The language model, or the ``parts`` of it that are stages of a pipeline on this rank.

    The first stage embeds the tokens and the last one computes the loss. Parameters have the same names in every stage.
    With tied embeddings the first and the last stage each have a copy of the embedding.
    """

    def __init__(self, settings: ModelSettings, parts: Sequence[range] = ()) -> None:
        super().__init__()
        self.parts = parts or (range(settings.layers),)
        """The layers of each of this rank's stages."""
        self.settings = settings
        """Those of rotary positions may change between steps."""
        self.first, self.last = self.parts[0].start == 0, self.parts[-1].stop == settings.layers
        self.context: Context = None
        self.routing = Routing(settings)
        self.loss = linear_loss
        self.vocabulary: dist.ProcessGroup | None = None
        """The ranks over which the vocabulary of the logits is split; None if it is not split."""
        if self.first or (self.last and settings.tied):
            self.embedding = nn.Embedding(settings.vocab, settings.width)
        if self.first and settings.positions:
            self.positions = nn.Embedding(settings.positions, settings.width)
        self.blocks = nn.ModuleDict({
            str(layer): Block(settings, layer, self.routing) for layers in self.parts for layer in layers
        })  # fmt: skip
        if self.last:
            self.norm = nn.RMSNorm(settings.width, settings.norm_eps)
            self.head = nn.Linear(settings.width, settings.vocab, bias=False)
            self.tie()

    @property
    def shared(self) -> frozenset[str]:
        """Parameters of which another pipeline stage has a copy."""
        return frozenset({"embedding.weight"}) if self.settings.tied and self.first != self.last else frozenset()

    def saved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's part of a checkpoint: its parameters, and the biases of its routers."""
        yield from self.named_parameters()
        yield from self.named_buffers()

    def move_biases(self, measured: torch.Tensor, rate: float) -> None:
        """Move the biases of the routers by ``rate``, given what all ranks together have measured in a step."""
        for name, module in self.named_modules():
            if isinstance(module, Experts):
                module.move_bias(measured[int(name.split(".")[1]) - self.routing.dense_layers], rate)

    def tie(self) -> None:
        """Make the output projection share the embedding, if configured, after either got new storage."""
        if self.last and self.settings.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        x: torch.Tensor,
        documents: torch.Tensor,
        targets: torch.Tensor | None = None,
        z_loss: float = 0.0,
        part: int = 0,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Logits [batch, sequence, vocab], or the terms of the loss [2] if ``targets`` are given.

        ``x`` and ``targets`` [batch, sequence] are token ids. ``documents`` [batch, sequence] numbers the document of
        each token within its row, of whole sequences even if they are split over ranks. Between pipeline stages ``x``
        and the result are activations [batch, sequence, width]; ``part`` is the number of this rank's stage.
        With a ``cache``, ``documents`` begin with the tokens in it, ``x`` has those that follow, and they are added.
        """
        inputs = attention_inputs(documents, self.settings, self.context, cache)
        layers = self.parts[part]
        if layers.start == 0:
            x = self.embedding(x)
            if self.settings.embedding_scale != 1:
                x = x * torch.tensor(self.settings.embedding_scale, dtype=x.dtype, device=x.device)
            if self.settings.positions:
                x = x + self.positions(within_documents(inputs.documents)[:, inputs.at])
        for layer in layers:
            x = self.blocks[str(layer)](x, inputs)
        if cache is not None:
            cache.length = documents.shape[1]
        if layers.stop < self.settings.layers:
            return x
        x, cap = self.norm(x), self.settings.logit_softcap
        if targets is not None:
            return self.loss(x, local(self.head.weight), targets, LossTerms(z_loss, cap, self.vocabulary))
        logits: torch.Tensor = self.head(x)
        return cap * torch.tanh(logits / cap) if cap else logits


def count_parameters(settings: ModelSettings) -> int:
    """Number of parameters of the whole model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(settings).parameters())


def draw(name: str, values: torch.Tensor, settings: ModelSettings, generator: torch.Generator) -> None:
    """Fill ``values`` with the initial values of the parameter ``name``."""
    if (special := DRAWS.get(name.rpartition(".")[2])) is not None:
        special(values, generator)
    elif values.dim() == 1:
        values.fill_(0.0 if name.endswith(".bias") else 1.0)
    else:
        values.normal_(0.0, init_std(name, settings), generator=generator)


def init_std(name: str, settings: ModelSettings) -> float:
    """Standard deviation of the initial values of the matrix ``name``.

    Matrices that write into the residual stream are scaled by 1/sqrt(2 * layers) (GPT-2) to keep its variance.
    Convolutions have that of torch's.
    """
    if name.endswith("_conv.weight"):
        return 1 / math.sqrt(3 * settings.state_conv)
    residual = name.endswith(("attention.output.weight", ".down.weight"))
    return settings.init_std / math.sqrt(2 * settings.layers) if residual else settings.init_std
