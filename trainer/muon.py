"""Muon: momentum whose matrices are orthogonalised (Jordan 2024, github.com/KellerJordan/Muon; arXiv 2502.16982).

A matrix is orthogonalised whole, wherever its shards are: one rank of the pipeline stage gathers it, and sends each
rank its part of the result. Matrices are spread over the ranks by cost, in the same way on all of them. So the update
is that of one rank to rounding, and copies on several ranks get the same bits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from opsd.trainer.regions import Region

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5
_EPS: Final = 1e-7
RMS: Final = 0.2
"""Root mean square of AdamW's updates, which those of a matrix are scaled to (arXiv 2502.16982, 2.2)."""


def is_orthogonalised(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon updates the parameter ``name``: the matrices of the layers, also those of experts and routers."""
    return name.startswith("blocks.") and parameter.dim() > 1 and not name.endswith("_conv.weight")


@torch.no_grad()
def orthogonalised(x: torch.Tensor) -> torch.Tensor:
    """The nearly orthogonal matrices of ``x`` [n, rows, columns]: singular values between 0.7 and 1.2, or 0.

    Five Newton-Schulz iterations of fifth order, in the type of ``x``.
    """
    if x.shape[-2] > x.shape[-1]:
        return orthogonalised(x.mT).mT
    a, b, c = _COEFFICIENTS
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a matrix that ``rank`` of the group holds, and whether it is the first to hold it."""

    rank: int
    bounds: tuple[tuple[int, int], ...]
    first: bool

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, end) for begin, end in self.bounds)

    @property
    def size(self) -> int:
        return math.prod(end - begin for begin, end in self.bounds)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The matrix of a parameter, or of its expert ``number``, and the rank that orthogonalises it."""

    name: str
    number: int
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    owner: int

    @property
    def cost(self) -> int:
        """In proportion to the operations of an iteration."""
        return math.prod(self.shape) * min(self.shape)

    def of(self, tensors: Mapping[str, torch.Tensor], region: Region) -> torch.Tensor:
        """This rank's part of it in ``tensors``, of which that of its parameter is ``region``."""
        whole = tensors[self.name]
        return whole[self.number - region.offset[0]] if whole.dim() > 2 else whole


class Muon:
    """The matrices among the parameters of this rank's pipeline stage, whose ranks are ``group``; None is one rank."""

    def __init__(
        self,
        shards: Mapping[str, torch.Tensor],
        regions: Mapping[str, Region],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        """``shards`` are the local parts of the parameters, ``dtype`` is that in which they are orthogonalised."""
        self._shards, self._regions, self._group, self._dtype = shards, regions, group, dtype
        rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())
        self.momentum = {name: torch.zeros_like(shard) for name, shard in shards.items()}
        own = {name: (region.offset, tuple(region.local.shape), not region.earlier) for name, region in regions.items()}
        held: list[_Held] = [own] * self._ranks
        if group is not None:
            dist.all_gather_object(held, own, group=group)
        matrices = _spread({name: region.shape for name, region in regions.items()}, held)
        self._mine = [(matrix, piece) for matrix in matrices for piece in matrix.pieces if piece.rank == rank]
        self._owned = [(matrix, piece) for matrix in matrices if matrix.owner == rank for piece in matrix.pieces]

    @torch.no_grad()
    def update(self, rate: float, decay: float, momentum: float) -> None:
        """Update the parameters by their gradients, with Nesterov's momentum and decoupled weight decay."""
        gradients = {name: shard.grad for name, shard in self._shards.items() if shard.grad is not None}
        torch._foreach_lerp_(list(self.momentum.values()), list(gradients.values()), 1 - momentum)
        ahead = {name: gradient.lerp(self.momentum[name], momentum) for name, gradient in gradients.items()}
        torch._foreach_mul_(list(self._shards.values()), 1 - rate * decay)
        for (matrix, _), part in zip(self._mine, self._orthogonal_parts(ahead), strict=True):
            shard = matrix.of(self._shards, self._regions[matrix.name])
            shard.add_(part.view_as(shard), alpha=-rate * RMS * math.sqrt(max(matrix.shape)))

    def _orthogonal_parts(self, tensors: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """This rank's parts of all matrices, of which ``tensors`` has its parts, once they are orthogonalised."""
        sent = [
            (matrix.owner, matrix.of(tensors, self._regions[matrix.name]))
            for matrix, piece in self._mine
            if piece.first
        ]
        first = [(matrix, piece) for matrix, piece in self._owned if piece.first]
        received = self._exchange(sent, [(piece.rank, piece.size) for _, piece in first])
        whole: dict[_Matrix, torch.Tensor] = {}
        for (matrix, piece), part in zip(first, received, strict=True):
            target = whole.setdefault(matrix, part.new_empty(matrix.shape))[piece.slices]
            target.copy_(part.view_as(target))
        by_shape: dict[tuple[int, ...], list[_Matrix]] = defaultdict(list)
        for matrix in whole:
            by_shape[matrix.shape].append(matrix)
        for alike in by_shape.values():
            whole |= zip(alike, orthogonalised(torch.stack([whole[matrix] for matrix in alike])), strict=True)
        back = [(piece.rank, whole[matrix][piece.slices]) for matrix, piece in self._owned]
        return self._exchange(back, [(matrix.owner, piece.size) for matrix, piece in self._mine])

    def _exchange(
        self, sent: Sequence[tuple[int, torch.Tensor]], expected: Sequence[tuple[int, int]]
    ) -> Sequence[torch.Tensor]:
        """Send tensors to ranks; receive those ``expected`` from ranks in so many elements, flat and in this order."""
        out: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
        for rank, part in sent:
            out[rank].append(part.reshape(-1).to(self._dtype))
        sizes = [sum(size for rank, size in expected if rank == source) for source in range(self._ranks)]
        flat = torch.cat([part for parts in out for part in parts] or [self._nothing()])
        if self._group is not None:
            received = flat.new_empty(sum(sizes))
            counts = [sum(part.numel() for part in parts) for parts in out]
            dist.all_to_all_single(received, flat, sizes, counts, self._group)
            flat = received
        order = sorted(range(len(expected)), key=lambda place: expected[place][0])
        found = dict(zip(order, torch.split(flat, [expected[place][1] for place in order]), strict=True))
        return [found[place] for place in range(len(expected))]

    def _nothing(self) -> torch.Tensor:
        return next(iter(self._shards.values())).new_empty(0, dtype=self._dtype)


_Held = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], bool]]
"""Of each parameter what a rank holds: where it begins, its shape, and whether no lower rank has the same."""


def _spread(shapes: Mapping[str, tuple[int, ...]], held: Sequence[_Held]) -> list[_Matrix]:
    """The matrices of all parameters, each with the rank that has the least to do, the most expensive first."""
    found = [
        _Matrix(name, number, shape[-2:], tuple(_pieces(name, number, held)), 0)
        for name, shape in shapes.items() for number in range(shape[0] if len(shape) > 2 else 1)
    ]  # fmt: skip
    costs = [0] * len(held)
    owners: dict[int, int] = {}
    for place in sorted(range(len(found)), key=lambda place: -found[place].cost):
        owners[place] = costs.index(min(costs))
        costs[owners[place]] += found[place].cost
    return [replace(matrix, owner=owners[place]) for place, matrix in enumerate(found)]


def _pieces(name: str, number: int, held: Sequence[_Held]) -> Iterator[_Piece]:
    for rank, own in enumerate(held):
        offset, shape, first = own[name]
        if len(shape) > 2:
            if not offset[0] <= number < offset[0] + shape[0]:
                continue
            offset, shape = offset[1:], shape[1:]
        if math.prod(shape):
            bounds = tuple((at, at + size) for at, size in zip(offset, shape, strict=True))
            yield _Piece(rank, bounds, first)
