"""Attention within documents: masks and kernels.

Three kernels give the same numbers. ``sdpa`` takes a mask and runs everywhere. ``varlen`` is FlashAttention over
concatenated documents and computes nothing that the mask would hide. ``flex`` skips hidden blocks and also supports
context parallelism. The last two need a GPU, and for bfloat16 one of compute capability 8.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from opsd.trainer.documents import chunks, first_tokens, visible
from opsd.trainer.dual_chunk import DualChunks, attend_dual_chunks, dual_chunks
from opsd.trainer.model_settings import LayerKind, ModelSettings
from opsd.trainer.rotary import rotary_angles, rotate, rotation_factors


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


FAST_KERNELS: Final = (8, 0)
"""The least compute capability of a GPU (A100) that has FlashAttention, and bfloat16 in FlexAttention's kernel."""
Context = DeviceMesh | None
"""The mesh over which sequences are split; None if each rank has whole ones."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Concatenated documents: document i is [starts[i], starts[i + 1]) of all tokens of the batch.

    ``starts`` is padded with the number of tokens to a power of two plus one, to avoid a recompilation for each batch.
    ``window`` is how many tokens a token sees, itself included; 0 is no limit.
    """

    starts: torch.Tensor
    longest: int
    window: int


Mask = torch.Tensor | Packed | BlockMask | DualChunks | None
"""In the format of the kernel; None is plain causal attention."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What the layers share in a forward pass.

    ``documents`` [batch, sequence] are those that tokens do not see beyond, ``at`` the positions of this rank's tokens
    in them. ``rotations`` and ``masks`` are those of each kind of layer that has attention. Scores are multiplied by
    ``scale``.
    """

    documents: torch.Tensor
    at: torch.Tensor
    rotations: Mapping[LayerKind, torch.Tensor]
    masks: Mapping[LayerKind, Mask]
    context: Context
    scale: float
    cache: Cache | None = None

    def rotate(self, x: torch.Tensor, kind: LayerKind) -> torch.Tensor:
        """``x`` [batch, sequence, heads, head_dim] with the positions of layers of this kind."""
        return rotate(x, self.rotations[kind]) if kind in self.rotations else x

    def with_earlier(self, layer: nn.Module, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``new`` [.., tokens, channels] after those of tokens that ``layer`` has read before."""
        return new if self.cache is None else self.cache.extend(layer, new)


def attention_inputs(
    documents: torch.Tensor, settings: ModelSettings, context: Context = None, cache: Cache | None = None
) -> AttentionInputs:
    """What the layers share, for the ``documents`` [batch, sequence] of whole sequences.

    With a ``cache`` these begin with the tokens in it, and the layers get those that follow.
    """
    length, device, past = documents.shape[1], documents.device, cache.length if cache else 0
    queries, keys = positions(length, context, device)[past:], gathered_positions(length, context, device)
    kernel = "sdpa" if past else kernel_for(settings, device, context)
    seen = documents if settings.document_mask else torch.zeros_like(documents)
    packs: dict[torch.Tensor, Packed] = {}

    def mask(within: torch.Tensor, window: int = 0) -> Mask:
        if kernel == "varlen":
            if within not in packs:
                packs[within] = pack(within)
            return replace(packs[within], window=window)
        if kernel == "flex":
            return _block_mask(within, queries, keys, window)
        return visible(within, queries, keys, window)

    masks: dict[LayerKind, Mask] = {}
    rotations: dict[LayerKind, torch.Tensor] = {}
    kinds = set(settings.kinds)
    if kinds & {"global", "nope"}:
        plain = context is None and not settings.document_mask and not past
        masks["global"] = masks["nope"] = None if plain else mask(seen)
    if kinds & {"window", "nope_window"}:
        masks["window"] = masks["nope_window"] = mask(seen, settings.window)
    if "chunk" in kinds:
        masks["chunk"] = mask(chunks(seen, settings.chunk))
    if kinds & {"global", "chunk"}:
        rotations["global"] = rotations["chunk"] = rotation_factors(rotary_angles(queries, settings))
    if "window" in kinds:
        rotations["window"] = rotation_factors(rotary_angles(queries, settings, window=True))
    if "dual_chunk" in kinds:
        rotations["dual_chunk"], masks["dual_chunk"] = dual_chunks(seen, settings, past)
    return AttentionInputs(seen, queries, rotations, masks, context, settings.score_scale, cache)


def kernel_for(settings: ModelSettings, device: torch.device, context: Context) -> str:
    """The configured kernel, or else the fastest that is supported: FlashAttention does not take float32."""
    if settings.attention != "auto":
        return settings.attention
    if device.type != "cuda" or (context is None and settings.dtype == "float32"):
        return "sdpa"
    if torch.cuda.get_device_capability(device) < FAST_KERNELS:
        return "sdpa"
    return "varlen" if context is None and not settings.attention_softcap else "flex"


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, context: Context, scale: float, softcap: float = 0.0
) -> torch.Tensor:
    """Attention of ``q`` [batch, heads, sequence, head_dim] to ``k`` and ``v``, which have at most as many heads.

    Scores are multiplied by ``scale``, and bounded by ``softcap`` unless that is 0.
    With a ``context`` the keys and values of all its ranks are gathered. With grouped queries they are small, and
    gathering allows any mask, unlike a ring of partial results (Llama 3, arXiv 2407.21783, section 3.3.2).
    """
    if context is not None:
        k, v = (gather(x, context) for x in (k, v))
    if isinstance(mask, BlockMask):
        bound = _bound(softcap) if softcap else None
        y = _flex_attention(q)(q, k, v, score_mod=bound, block_mask=mask, scale=scale, enable_gqa=True)
        assert isinstance(y, torch.Tensor)
        return y
    if isinstance(mask, Packed):
        return _attend_packed(q, k, v, mask, scale)
    if isinstance(mask, DualChunks):
        dual: torch.Tensor = attend_dual_chunks(q, k, v, mask, scale, softcap)
        return dual
    if softcap:
        return _attend_bounded(q, k, v, mask, scale, softcap)
    if mask is not None and k.shape[1] == 1 and q.shape[2] < k.shape[2]:
        return _attend_one(q, k, v, mask, scale)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )  # fmt: skip


@cache
def _bound(softcap: float) -> Callable[..., torch.Tensor]:
    """FlexAttention's form of the bound; one function per value, so that it is compiled once."""

    def bound(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return bound


def _attend_bounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """Attention with bounded scores, which no kernel of the CPU has."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = softcap * torch.tanh(q @ k.mT * scale / softcap)
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v


def _attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:  # fmt: skip
    """Attention of a few queries of many heads to one head, which the kernel would copy for each of them."""
    rows = q.flatten(1, 2)
    scores = (rows @ k[:, 0].mT).view(*q.shape[:3], -1) * scale
    weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1, dtype=torch.float32).to(v.dtype)
    return (weights.flatten(1, 2) @ v[:, 0]).view(*q.shape[:3], -1)


def _flex_attention(q: torch.Tensor) -> Callable[..., Any]:
    """Compiled on a GPU, as it would otherwise hold the scores of all pairs. The CPU has no compiled backward pass."""
    if q.is_cuda and not torch.compiler.is_compiling():
        return _compiled_flex_attention()
    return flex_attention


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Compiled on first use: loading the compiler takes most of a second, which other ranks need not spend."""
    return torch.compile(flex_attention)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather(x: torch.Tensor, context: DeviceMesh) -> torch.Tensor:
    """The parts ``x`` [batch, heads, sequence, channels] of all ranks of ``context``, concatenated."""
    whole: torch.Tensor = _Gather.apply(x, context.get_group())  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    """Gathers along the sequence; the gradient of a part is the sum of all ranks' gradients for it.

    torch's functional collectives do the same, but on gloo they corrupt memory about once in ten thousand calls (2.13).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x, group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [part.contiguous() for part in gradient.chunk(ctx.group.size(), dim=2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


_GROUPED: Final[dict[str, Any]] = {"enable_gqa": True} if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}) else {}
"""That several heads share keys: torch 2.11 sees it for itself and has no such argument."""


def _attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Packed, scale: float
) -> torch.Tensor:  # fmt: skip
    batch, heads, length, channels = q.shape
    values = v.shape[-1]
    if values < channels:  # the kernel takes heads of one size
        v = F.pad(v, (0, channels - values))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    window = (mask.window - 1 if mask.window else -1, 0)
    y = varlen_attn(
        q, k, v, mask.starts, mask.starts, mask.longest, mask.longest, scale=scale, window_size=window,
        **_GROUPED,
    )  # fmt: skip
    assert isinstance(y, torch.Tensor)
    return y.view(batch, length, heads, channels)[..., :values].transpose(1, 2)


def positions(length: int, context: Context, device: torch.device) -> torch.Tensor:
    """The positions of this rank's tokens in sequences of ``length``, ascending.

    Split over n ranks, rank i has parts i and 2n - 1 - i of 2n, so that all ranks have equal causal attention to
    compute (Llama 3, section 3.3.2).
    """
    if context is None:
        return torch.arange(length, device=device)
    return _part(length, context.get_local_rank(), context.size(), device)


def gathered_positions(length: int, context: Context, device: torch.device) -> torch.Tensor:
    """The positions of the keys as ``attend`` gathers them: the first rank's, the second's, and so on."""
    if context is None:
        return torch.arange(length, device=device)
    return torch.cat([_part(length, rank, context.size(), device) for rank in range(context.size())])


def _part(length: int, rank: int, ranks: int, device: torch.device) -> torch.Tensor:
    parts = torch.arange(length, device=device).chunk(2 * ranks)
    return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]))


def _block_mask(documents: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, window: int) -> BlockMask:
    def rule(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        distance = queries[query] - keys[key]
        same = documents[row, queries[query]] == documents[row, keys[key]]
        return same & (distance >= 0) & (distance < (window or documents.shape[1]))

    return create_block_mask(
        rule, documents.shape[0], None, len(queries), len(keys), documents.device, _compile=documents.is_cuda
    )


def pack(documents: torch.Tensor, window: int = 0) -> Packed:
    """The starts of the ``documents`` [batch, sequence] when all rows are concatenated.

    Waits for the device, which alone knows how many there are.
    """
    rows, length = documents.shape
    begin = first_tokens(documents).flatten().nonzero().flatten()
    starts = begin.new_full((2 ** math.ceil(math.log2(len(begin))) + 1,), rows * length, dtype=torch.int32)
    starts[: len(begin)] = begin
    return Packed(starts, length, window)
