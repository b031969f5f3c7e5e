"""A rank's own part of a parameter that is split or copied over the ranks that share a layer."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``parameter``, to be used with the tokens of all ranks that share a layer.

    Of what each of them holds whole, the gradients are parts that have to be added.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    placements = [Partial() if place.is_replicate() else place for place in parameter.placements]
    return parameter.to_local(grad_placements=placements)
