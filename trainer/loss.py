"""Next-token loss from the activations before the output projection; only a part of the logits exists at a time.

The gradient of a part is computed with its loss, so that no logits are kept or computed twice (Liger Kernel, arXiv
2410.10989, 3.2). The vocabulary may be split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

PART_BYTES: Final = 256 << 20
"""Bound of the logits in float32 that exist at a time."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What is minimised: cross-entropy in nats, and ``z_loss`` times log(Z)^2 (PaLM, arXiv 2204.02311, 5).

    Logits x are bounded as c tanh(x / c) by the ``softcap`` c unless it is 0. With a ``group`` each of its ranks has an
    equal share of the vocabulary, in the order of the ranks, and all of them get the same loss.
    """

    z_loss: float = 0.0
    softcap: float = 0.0
    group: dist.ProcessGroup | None = None


PartLoss = Callable[[torch.Tensor, torch.Tensor, LossTerms, float], tuple[torch.Tensor, torch.Tensor]]


def part_loss(
    logits: torch.Tensor, targets: torch.Tensor, terms: LossTerms, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of both terms over tokens [2], and the gradient of ``share`` times the sum of both by the logits.

    ``logits`` [tokens, vocab] of any floating-point type, ``targets`` [tokens] of token ids; computed in float32, in
    the memory of the logits if they are of this type.
    """
    logits, cap, group = logits.float(), terms.softcap, terms.group
    if cap:
        logits = logits.div_(cap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(cap)
    size = logits.shape[-1]
    local = targets - (group.rank() * size if group else 0)
    mine = (local >= 0) & (local < size)
    at = local.clamp(0, size - 1)[:, None]
    chosen = torch.where(mine, logits.gather(-1, at).squeeze(-1), 0.0)
    top = logits.amax(dim=-1)
    if group:
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
    powers = logits.sub_(top[:, None]).exp_()
    total = powers.sum(dim=-1)
    if group:
        total, chosen = sums = torch.stack((total, chosen))
        dist.all_reduce(sums, group=group)
    log_z = total.log() + top
    gradient = powers.mul_((share * (1 + 2 * terms.z_loss * log_z) / total)[:, None])
    gradient.scatter_(-1, at, gradient.gather(-1, at) - share * mine[:, None])
    if cap:
        gradient.mul_(slope)
    return torch.stack(((log_z - chosen).sum(), terms.z_loss * log_z.square().sum())), gradient


def linear_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    terms: LossTerms,
    *,
    part_bytes: int = PART_BYTES,
    of_part: PartLoss = part_loss,
    halves: bool = False,
) -> torch.Tensor:
    """The means of both terms over tokens [2] for the logits ``x`` [.., width] times ``weight`` [vocab, width].

    Only a multiple of their sum may be minimised: gradients of one term alone are not computed. ``targets`` [..] are
    token ids. With ``halves`` there may be a backward pass for ``x`` and another for ``weight``. A DTensor ``x`` is
    split by tokens among the ranks of the group.
    """
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    tokens = max(1, part_bytes // (4 * weight.shape[0]))
    wanted = torch.is_grad_enabled()
    means: torch.Tensor = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), weight, targets.flatten(), terms, tokens, of_part, wanted, halves
    )
    return means


class _LinearLoss(torch.autograd.Function):
    """See ``linear_loss``; ``tokens`` are computed at a time, with gradients if ``wanted``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        terms: LossTerms,
        tokens: int,
        of_part: PartLoss,
        wanted: bool,
        halves: bool,
    ) -> torch.Tensor:
        ctx.halves = halves
        sums = x.new_zeros(2, dtype=torch.float32)
        by_x = torch.empty_like(x) if wanted else None
        by_weight: torch.Tensor | None = None
        for begin in range(0, len(x), tokens):
            part = slice(begin, begin + tokens)
            loss, gradient = of_part(x[part] @ weight.mT, targets[part], terms, 1 / len(x))
            sums += loss
            if by_x is not None:
                gradient = gradient.to(x.dtype)
                torch.mm(gradient, weight, out=by_x[part])
                product = gradient.mT @ x[part]
                by_weight = product.float() if by_weight is None else by_weight.add_(product)
        if by_weight is not None:
            ctx.save_for_backward(by_x, by_weight.to(weight.dtype))
        return sums / len(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_x, by_weight = ctx.saved_tensors
        factor = gradient[0]
        if ctx.halves:
            by_x, by_weight = (
                value * factor if needed else None
                for value, needed in zip((by_x, by_weight), ctx.needs_input_grad, strict=False)
            )
        else:
            by_x, by_weight = by_x.mul_(factor), by_weight.mul_(factor)
        return by_x, by_weight, None, None, None, None, None, None
