"""Dual-chunk attention (arXiv 2402.17463): a model reads beyond the length of its training, without more of it.

A document is divided into chunks of c - w tokens, where c is ``dual_chunk`` and w is ``dual_chunk_local``. Keys have
their position in their chunk, and so have queries towards keys of their own chunk. Towards the chunk before, a query
stands c - w further on but at most at c, so that the last w distances are true ones. Towards earlier chunks it stands
at c. No distance is more than c.

The farthest position is c as in the authors' program and in vLLM; in the paper it is c - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from opsd.trainer.documents import within_documents
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.rotary import rotary_angles, rotary_frequencies, rotate, rotation_factors, turns

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
