"""Attention in all its kinds: positions, documents, kernels, dual chunks, latent.

Documents that share a sequence: which tokens see each other, and where each stands in its own.
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

from opsd.trainer.model_settings import LayerKind, ModelSettings, yarn_attention


def visible(documents: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, window: int = 0) -> torch.Tensor:
    """The mask of keys [.., k] that a query [.., q, .] may see, bool [batch, 1, q, k].

    These are the query itself and earlier tokens of its document, of them the last ``window`` unless that is 0.
    """
    distance = queries[:, None] - keys[None, :]
    window_mask = (distance >= 0) & (distance < window) if window else distance >= 0
    return (documents[:, None, queries, None] == documents[:, None, None, keys]) & window_mask


def chunks(documents: torch.Tensor, length: int) -> torch.Tensor:
    """Number the parts of ``length`` tokens of each of the ``documents`` [batch, sequence], as if they were documents.

    They count from the start of a document, as they do when it is read by itself.
    """
    return (within_documents(documents) % length == 0).cumsum(dim=1)


def within_documents(documents: torch.Tensor) -> torch.Tensor:
    """The position of each token in its document, from 0, for ``documents`` [batch, sequence]."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return at - torch.where(first_tokens(documents), at, 0).cummax(dim=1).values


def first_tokens(documents: torch.Tensor) -> torch.Tensor:
    """Whether each token is the first of its document, for ``documents`` [batch, sequence]."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return first


# Rotary positions (RoPE, arXiv 2104.09864) and the ways of stretching them to longer sequences.


def rotary_angles(at: torch.Tensor, settings: ModelSettings, *, window: bool = False) -> torch.Tensor:
    """The cosines and sines [2, .., channels / 2] of RoPE for the positions ``at`` [..].

    Positions may count through the whole sequence: attention depends only on their differences, so they need not
    restart with each document. Layers with a ``window`` may have a base of their own.
    """
    frequencies, scale = rotary_frequencies(settings, at.device, window=window)
    return turns(at, frequencies) * scale


def rotary_frequencies(
    settings: ModelSettings, device: torch.device, *, window: bool = False
) -> tuple[torch.Tensor, float]:
    """Angles per position [channels / 2], and the factor of rotated queries and keys."""
    channels = settings.rotary_channels
    exponents = -torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels
    if window and settings.window_theta:
        return settings.window_theta**exponents, 1.0
    frequencies = settings.rope_theta**exponents / settings.rope_factor
    if settings.yarn_factor > 1:
        return _yarn(frequencies, settings), settings.yarn_attention or yarn_attention(settings.yarn_factor)
    return (_llama3(frequencies, settings) if settings.llama3_factor > 1 else frequencies), 1.0


def turns(at: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """The cosines and sines [2, .., channels / 2] of the positions ``at`` [..]."""
    angles = at[..., None].float() * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def _yarn(frequencies: torch.Tensor, settings: ModelSettings) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3).

    Channels that turn more often than the upper bound of ``yarn_turns`` within the original length keep their
    frequency, those that turn less often than the lower one are slowed down by the factor, and those between by a
    linear ramp over the channels.
    """
    channels = settings.rotary_channels

    def channel(turns: float) -> float:
        wavelength = settings.yarn_positions / (turns * 2 * math.pi)
        return channels * math.log(wavelength) / (2 * math.log(settings.rope_theta))

    few, many = settings.yarn_turns
    low, high = channel(many), channel(few)
    if settings.yarn_whole_channels:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    ramp = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    slowed = ((ramp - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return slowed * (frequencies / settings.yarn_factor) + (1 - slowed) * frequencies


def _llama3(frequencies: torch.Tensor, settings: ModelSettings) -> torch.Tensor:
    """Llama 3.1's scaling: as YaRN, but with a ramp over the turns, and no factor for queries and keys.

    Source: ``apply_scaling`` in meta-llama/llama-models.
    """
    few, many = settings.llama3_turns
    turns = settings.llama3_positions * frequencies / (2 * math.pi)
    kept = ((turns - few) / (many - few)).clamp(0, 1)
    return (1 - kept) * (frequencies / settings.llama3_factor) + kept * frequencies


def rotation_factors(angles: torch.Tensor) -> torch.Tensor:
    """The factors of ``rotate``, [2, .., 1, channels], for ``angles`` [2, .., channels / 2] from ``rotary_angles``."""
    cos, sin = angles
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))[..., None, :]


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of channels (i, i + n / 2) of the first n of ``x`` [batch, sequence, heads, head_dim], as in Llama.

    n is the number of channels of ``rotation``.
    """
    cos, sin = rotation.to(x.dtype)
    channels = cos.shape[-1]
    if channels < x.shape[-1]:
        return torch.cat((rotate(x[..., :channels], rotation), x[..., channels:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(channels // 2, dims=-1), sin)


# Dual-chunk attention (arXiv 2402.17463): a model reads beyond the length of its training, without more of it.
#
# A document is divided into chunks of c - w tokens, where c is ``dual_chunk`` and w is ``dual_chunk_local``. Keys
# have their position in their chunk, and so have queries towards keys of their own chunk. Towards the chunk before,
# a query stands c - w further on but at most at c, so that the last w distances are true ones. Towards earlier
# chunks it stands at c. No distance is more than c.
#
# The farthest position is c as in the authors' program and in vLLM; in the paper it is c - 1.


ROWS: Final = 256
"""Queries whose scores are in memory at a time, outside of a backward pass."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [``begin``, ``end``), and where their chunk, the chunk before it and their document begin."""

    begin: int
    end: int
    chunk: int
    before: int
    document: int


@dataclass(frozen=True, slots=True)
class DualChunks:
    """How this rank's queries see their documents.

    ``blocks`` are those of each row, ``past`` the number of tokens before the first query. ``successive`` and ``inter``
    [2, batch, queries, channels] turn queries on from their position in their own chunk. Queries are multiplied by
    ``growth`` [batch, 1, queries, 1].
    """

    blocks: tuple[tuple[Block, ...], ...]
    past: int
    successive: torch.Tensor
    inter: torch.Tensor
    growth: torch.Tensor | None


def dual_chunks(documents: torch.Tensor, settings: ModelSettings, past: int = 0) -> tuple[torch.Tensor, DualChunks]:
    """The rotation of queries and keys in their own chunks, for ``rotate``, and the rest, from token ``past`` on."""
    size, farthest = settings.dual_chunk - settings.dual_chunk_local, settings.dual_chunk
    at = within_documents(documents)
    starts = (at == 0).nonzero().tolist()
    blocks = tuple(
        _blocks([at for of, at in starts if of == row], documents.shape[1], size, past) for row in range(len(documents))
    )
    at = at[:, past:]
    inside = at % size
    frequencies, _ = rotary_frequencies(settings, documents.device)

    def onward(to: torch.Tensor | int) -> torch.Tensor:
        return rotation_factors(turns(to - inside, frequencies)).squeeze(-2)

    successive = onward((inside + size).clamp(max=farthest))
    inter = onward(min(2 * size - 1, farthest))
    growth = None
    if settings.dual_chunk_positions:
        ratio = (at + 1) / settings.dual_chunk_positions
        growth = (0.1 * ratio.log() + 1).clamp(min=1)[:, None, :, None]
    own = rotation_factors(rotary_angles(inside, settings))
    return own, DualChunks(blocks, past, successive, inter, growth)


def _blocks(starts: list[int], length: int, size: int, past: int) -> tuple[Block, ...]:
    """Those of a row whose documents begin at ``starts``."""
    return tuple(
        Block(begin, min(begin + ROWS, last), chunk, max(document, chunk - size), document)
        for document, end in zip(starts, [*starts[1:], length], strict=True)
        for chunk in range(document, end, size)
        for last in [min(chunk + size, end)]
        for begin in range(max(chunk, past), last, ROWS)
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_dual_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: DualChunks, scale: float, softcap: float
) -> torch.Tensor:
    """Attention of ``q`` [batch, heads, queries, head_dim] to ``k`` and ``v``, which have at most as many heads.

    All have their rotary channels first, turned to their positions in their own chunks.
    """
    if chunks.growth is not None:
        q = q * chunks.growth.to(q.dtype)
    q = q.reshape(len(q), k.shape[1], -1, *q.shape[2:])
    rows = []
    for row, blocks in enumerate(chunks.blocks):
        parts = []
        for block in blocks:
            own = slice(block.begin - chunks.past, block.end - chunks.past)
            towards = _towards(q[row, :, :, own], block, chunks.successive[:, row, own], chunks.inter[:, row, own])
            parts.append(_attend_block(towards, k[row], v[row], scale, softcap))
        rows.append(torch.cat(parts, dim=-2))
    return torch.stack(rows).flatten(1, 2)


def _towards(
    q: torch.Tensor, block: Block, successive: torch.Tensor, inter: torch.Tensor
) -> list[tuple[torch.Tensor, range]]:
    """The block's queries ``q``, turned as they are towards each range of keys that they see."""
    before, chunk = range(block.before, block.chunk), range(block.chunk, block.end)
    towards = [(q, chunk)]
    if before:
        towards.insert(0, (rotate(q, successive), before))
    if block.document < block.before:
        towards.insert(0, (rotate(q, inter), range(block.document, block.before)))
    return towards


def _attend_block(
    towards: list[tuple[torch.Tensor, range]], k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Of queries [kv_heads, group, queries, head_dim], the last of the tokens they see, to [.., value_dim]."""
    scores = torch.cat([_product(q, k[:, keys.start : keys.stop].mT) for q, keys in towards], dim=-1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[-2:]
    future = torch.ones(queries, keys, dtype=torch.bool, device=k.device).triu(keys - queries + 1)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1, dtype=torch.float32).to(v.dtype)
    return _product(weights, v[:, towards[0][1].start : towards[-1][1].stop])


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x`` [kv_heads, group, m, n] times ``y`` [kv_heads, n, p], without a copy of ``y`` for each of the group."""
    return (x.flatten(1, 2) @ y).view(*x.shape[:3], -1)


# Attention within documents: masks and kernels.
#
# Three kernels give the same numbers. ``sdpa`` takes a mask and runs everywhere. ``varlen`` is FlashAttention over
# concatenated documents and computes nothing that the mask would hide. ``flex`` skips hidden blocks and also
# supports context parallelism. The last two need a GPU, and for bfloat16 one of compute capability 8.0.


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


# Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1).
#
# Keys and values of all heads are computed from one latent of ``kv_rank`` channels, and queries from one of
# ``query_rank`` channels if that is not 0. Of each head ``rope_dim`` channels have positions; all heads share their
# keys.
#
# A cache has the latents. A few tokens that follow many are computed with the latents themselves as keys and values.


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
