"""Next-token loss, also of logits whose vocabulary is split over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def next_token_loss(
    logits: torch.Tensor, targets: torch.Tensor, z_loss: float = 0.0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The terms of the loss [2]: mean cross-entropy in nats per token, and ``z_loss`` times the mean of log(Z)^2.

    The second is PaLM's (arXiv 2204.02311, 5); what is minimised is their sum. ``logits`` [..., vocab], ``targets``
    [...] of token ids; computed in float32. With a ``group`` the logits are this rank's equal share of the vocabulary,
    in the order of its ranks, and all of them get the same loss.
    """
    logits, targets = logits.flatten(0, -2).float(), targets.flatten()
    if group is None:
        loss = F.cross_entropy(logits, targets)
        log_z = torch.logsumexp(logits, dim=-1) if z_loss else None
    else:
        log_z = _log_z(logits, group)
        loss = (log_z - _chosen(logits, targets, group)).mean()
    regulariser = z_loss * log_z.square().mean() if z_loss and log_z is not None else torch.zeros_like(loss)
    return torch.stack((loss, regulariser))


def _log_z(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    top = logits.detach().amax(dim=-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    return _sum((logits - top[:, None]).exp().sum(dim=-1), group).log() + top


def _chosen(logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The logit of each target, from the rank that has it."""
    size = logits.shape[-1]
    local = targets - dist.get_rank(group) * size
    mine = (local >= 0) & (local < size)
    picked = logits.gather(-1, local.clamp(0, size - 1)[:, None]).squeeze(-1)
    return _sum(torch.where(mine, picked, 0.0), group)


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total: torch.Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group, each of which goes on to compute the same with it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
