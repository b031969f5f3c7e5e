"""Expert parallelism: each rank of a group has some of a layer's experts, and tokens go to where theirs are.

GShard (arXiv 2006.16668) without capacities: what is sent is as much as the router makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from opsd.trainer.rows import rows

Networks = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes rows that are sorted by expert, given how many each expert has."""


class _Exchange(torch.autograd.Function):
    """Sends the first ``sent[0]`` rows to the first rank, and so on; receives ``received`` rows in the same order."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (sent, received), group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received = ctx.splits
        return _exchanged(gradient, received, sent, ctx.group), None, None, None


class _Part(torch.autograd.Function):
    """The same, with a gradient that is a ``share`` of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.share, None


def _exchanged(x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(output, x.contiguous(), received, sent, group)
    return output


def averaged(parameter: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """``parameter`` of experts that compute the tokens of all ranks of ``group``.

    Its gradient is the sum over these ranks, where that of every other parameter is the mean over all ranks.
    """
    if group is None:
        return parameter
    part: torch.Tensor = _Part.apply(parameter, 1 / group.size())  # type: ignore[no-untyped-call]
    return part


def dispatch(x: torch.Tensor, counts: torch.Tensor, networks: Networks, group: dist.ProcessGroup) -> torch.Tensor:
    """``networks`` of all ranks of ``group`` for the rows ``x`` [n, width], sorted by expert; the results in order.

    ``counts`` [experts] says how many rows each expert has here. The experts are spread evenly over the ranks.
    """
    sizes = counts.view(group.size(), -1)
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes.contiguous(), group=group)
    sent, received = sizes.sum(1).tolist(), theirs.sum(1).tolist()
    y: torch.Tensor = _Exchange.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    expert = torch.arange(sizes.shape[1], device=x.device).repeat(group.size()).repeat_interleave(theirs.flatten())
    order = expert.argsort(stable=True)
    inverse = order.argsort()
    y = rows(networks(rows(y, order, inverse), theirs.sum(0)), inverse, order)
    back: torch.Tensor = _Exchange.apply(y, received, sent, group)  # type: ignore[no-untyped-call]
    return back
