"""The part of a tensor that this rank holds, and initial values that do not depend on how tensors are split."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from opsd.trainer.model import Decoder, draw


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a tensor on this rank: ``local`` begins at ``offset`` of a tensor of shape ``shape``."""

    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    earlier: tuple[int, ...] = ()
    """The lower ranks that hold the same region."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The position of ``local`` in the whole tensor."""
        return tuple(slice(at, at + n) for at, n in zip(self.offset, self.local.shape, strict=True))


def region_of(tensor: torch.Tensor) -> Region:
    """The local part of a tensor and its position; for a plain tensor, all of it."""
    local, shape = local_part(tensor), tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Region(local, shape, (0,) * tensor.dim())
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    ranks = tensor.device_mesh.mesh
    mine = int(ranks[tuple(coordinate)])
    alike = ranks[tuple(
        slice(None) if placement.is_replicate() else at
        for at, placement in zip(coordinate, tensor.placements, strict=True)
    )]  # fmt: skip
    earlier = tuple(rank for rank in alike.flatten().tolist() if rank < mine)
    return Region(local, shape, tuple(offset), earlier)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` on this rank, sharing its memory, without autograd."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def holders(tensor: torch.Tensor) -> int:
    """How many ranks of the tensor's mesh hold each element of it."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes: Sequence[int] = tensor.device_mesh.shape
    return math.prod(n for n, placement in zip(sizes, tensor.placements, strict=True) if placement.is_replicate())


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Draw every parameter in full from its own generator and keep our part: the same bits in every layout.

    Drawing only the local part would give the ranks of a tensor-parallel group equal shards.
    """
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        region = region_of(parameter)
        key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(region.local.device).manual_seed(int.from_bytes(key, "little") >> 1)
        whole = torch.empty(region.shape, dtype=region.local.dtype, device=region.local.device)
        draw(name, whole, model.settings, generator)
        region.local.copy_(whole[region.slices])
