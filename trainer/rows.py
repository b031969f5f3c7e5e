"""Rows of a tensor in another order, with exact gradients."""

from __future__ import annotations

from typing import Any

import torch


class _Rows(torch.autograd.Function):
    """Row i is row ``order[i] // times`` of ``x``; ``inverse`` is the inverse of the permutation ``order``.

    Both passes only read by index: no atomic additions, whose order would change the bits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, times: int
    ) -> torch.Tensor:  # fmt: skip
        ctx.times = times
        ctx.save_for_backward(inverse)
        return x[order // times]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse].view(-1, ctx.times, gradient.shape[-1]).sum(1), None, None, None


def rows(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, times: int = 1) -> torch.Tensor:
    """See ``_Rows``."""
    taken: torch.Tensor = _Rows.apply(x, order, inverse, times)  # type: ignore[no-untyped-call]
    return taken
