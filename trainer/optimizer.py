"""AdamW and Muon on parameters that are split over ranks.

Muon: momentum whose matrices are orthogonalised (Jordan 2024, github.com/KellerJordan/Muon; arXiv 2502.16982).

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
from torch import nn

from opsd.trainer.model import Decoder
from opsd.trainer.regions import Region, holders, local_part, region_of
from opsd.trainer.settings import OptimizerSettings

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


# AdamW on this rank's shards, Muon where it is wanted, and the global gradient norm.


class Optimizer:
    """Fused AdamW, or for the matrices of the layers Muon. Norms have no weight decay, embeddings one of their own.

    AdamW is elementwise, so each rank updates its own shards as plain tensors. DTensors would give the same bits but
    cost tenths of a second in the first step after every restart.
    """

    def __init__(self, model: Decoder, settings: OptimizerSettings, group: dist.ProcessGroup | None = None) -> None:
        """``group`` are the ranks that hold parts of ``model``; None is this one."""
        self._parameters = list(model.parameters())
        self._holders = [
            holders(value) * (2 if name in model.shared else 1) for name, value in model.named_parameters()
        ]
        self._settings = settings
        self.shards = {name: nn.Parameter(local_part(value)) for name, value in model.named_parameters()}
        self._muon: Muon | None = None
        regions = {name: region_of(value) for name, value in model.named_parameters() if is_orthogonalised(name, value)}
        if settings.kind == "muon":
            dtype = torch.bfloat16 if model.settings.dtype == "bfloat16" else torch.float32
            self._muon = Muon({name: self.shards[name] for name in regions}, regions, group, dtype)
        others = {name: shard for name, shard in self.shards.items() if not (self._muon and name in regions)}
        decays = {name: _decay(name, shard, settings) for name, shard in others.items()}
        self._adamw = torch.optim.AdamW(
            [
                {"params": [others[name] for name in others if decays[name] == decay], "weight_decay": decay}
                for decay in dict.fromkeys(decays.values())
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        for shard in others.values():
            self._adamw.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """The state of the parameter ``name``, shaped like its shard: exp_avg, and with AdamW exp_avg_sq."""
        if self._muon and name in self._muon.momentum:
            return {"exp_avg": self._muon.momentum[name]}
        state = self._adamw.state[self.shards[name]]
        return {moment: state[moment] for moment in ("exp_avg", "exp_avg_sq")}

    @property
    def updates(self) -> torch.Tensor:
        """The number of updates so far, needed for the bias correction; a scalar."""
        count: torch.Tensor = next(iter(self._adamw.state.values()))["step"]
        return count

    def set_updates(self, updates: float) -> None:
        """Set the number of updates so far, of every parameter."""
        for state in self._adamw.state.values():
            state["step"].fill_(updates)

    def take_gradients(self) -> torch.Tensor:
        """Take the gradients from the model.

        Returns the sum of their squares on this rank, float64. Its sum over ranks is the square of the global norm:
        what several ranks hold counts on each of them in part.
        """
        gradients = []
        for parameter, shard in zip(self._parameters, self.shards.values(), strict=True):
            assert parameter.grad is not None
            shard.grad, parameter.grad = local_part(parameter.grad), None
            gradients.append(shard.grad)
        squares = torch.stack(torch._foreach_norm(gradients)).double().square()
        return (squares / squares.new_tensor(self._holders)).sum()

    def update(self, rate: float, norm: float) -> bool:
        """Update the parameters with the learning rate ``rate``, given the global gradient norm.

        If the norm is not finite, returns False, drops the gradients and changes nothing.
        """
        if math.isfinite(norm):
            if norm > self._settings.clip:
                gradients = [shard.grad for shard in self.shards.values() if shard.grad is not None]
                torch._foreach_mul_(gradients, self._settings.clip / norm)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            if self._muon:
                self._muon.update(rate, self._settings.weight_decay, self._settings.momentum)
        for shard in self.shards.values():
            shard.grad = None
        return math.isfinite(norm)


def _decay(name: str, shard: torch.Tensor, settings: OptimizerSettings) -> float:
    """The weight decay of a parameter. Embeddings have none by default (OLMo 2, SmolLM3)."""
    if name.startswith(("embedding.", "positions.")):
        return settings.embedding_decay
    return settings.weight_decay if shard.dim() > 1 else 0.0
