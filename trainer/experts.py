"""Feed-forward layers: dense ones, and mixtures of experts.

A rank's own part of a parameter that is split or copied over the ranks that share a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from opsd.trainer.attention import Context
from opsd.trainer.model_settings import ModelSettings


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``parameter``, to be used with the tokens of all ranks that share a layer.

    Of what each of them holds whole, the gradients are parts that have to be added.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    placements = [Partial() if place.is_replicate() else place for place in parameter.placements]
    return parameter.to_local(grad_placements=placements)


# Feed-forward networks: gated linear units (arXiv 2002.05202).


ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """A gated linear unit with ``ffn`` channels."""

    def __init__(self, settings: ModelSettings, ffn: int) -> None:
        super().__init__()
        width, bias = settings.width, settings.ffn_bias
        self.gate = nn.Linear(width, ffn, bias=bias)
        self.up = nn.Linear(width, ffn, bias=bias)
        self.down = nn.Linear(ffn, width, bias=bias)
        self.activation = ACTIVATIONS[settings.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [.., width] to the same shape."""
        y: torch.Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return y


# Mixture of experts: a router sends each token to a few of a layer's feed-forward networks.
#
# No token is dropped: the products are as large as the router makes them. Two losses act on the routers, and their
# biases can be moved instead (DeepSeek-V3, arXiv 2412.19437, 2.1.2). The losses reach the gradients where they
# arise, so that they need no way through layers and pipeline stages; ``Routing`` measures them.
#
# With expert parallelism each rank of a group has some of a layer's experts, and tokens go to where theirs are:
# GShard (arXiv 2006.16668) without capacities.


BALANCE, Z, ENTROPY, LOADS = range(4)
"""Columns of ``Routing.measured``; the loads of all experts begin at the last."""


class Routing:
    """What the routers of a model share: the weights of their losses, and what they measure in a step."""

    def __init__(self, settings: ModelSettings) -> None:
        self.balance_loss = self.z_loss = 0.0
        """Weights of the losses."""
        self.share = 1.0
        """Of a micro-batch in the step."""
        self.copies = 1
        """How many ranks compute the routing of the same tokens, and add up their gradients."""
        self.context: Context = None
        self.group: dist.ProcessGroup | None = None
        """The ranks over which the experts are spread; None if each rank has all."""
        self.dense_layers, self.experts = settings.dense_layers, settings.experts
        self._shape = (settings.expert_layers, LOADS + settings.experts)
        self.measured = torch.zeros(self._shape, dtype=torch.float64)
        """A row for each layer with experts.

        The weighted losses, and the entropy of a token's gates as a share of the greatest possible, are means over
        tokens. A load is the number of tokens that went to an expert. Rows of other pipeline stages are 0.
        """

    def begin(self, micro_batches: int, device: torch.device) -> None:
        """Forget what was measured; the gradients of so many micro-batches follow."""
        self.share = 1 / micro_batches
        self.measured = torch.zeros(self._shape, dtype=torch.float64, device=device)

    def add(self, layer: int, figures: torch.Tensor) -> None:
        """Add what the router of ``layer`` measured for a micro-batch."""
        row = self.measured[layer - self.dense_layers]
        row[:LOADS] += figures[:LOADS] * self.share
        row[LOADS:] += figures[LOADS:]

    def of_all(self, sums: Sequence[float], parts: int) -> torch.Tensor:
        """``measured`` by all ranks, given its ``sums`` over them; each stage has so many ranks as ``parts``."""
        measured = torch.tensor(sums, dtype=torch.float64).view(self._shape)
        measured[:, :LOADS] /= parts
        measured[:, LOADS:] /= self.copies
        return measured


def routing_figures(measured: torch.Tensor) -> dict[str, float]:
    """The entries of ``metrics.jsonl`` from the ``measured`` rows of all layers; empty for a dense model."""
    if not len(measured):
        return {}
    loads = measured[:, LOADS:]
    return {
        "balance_loss": measured[:, BALANCE].sum().item(), "router_z_loss": measured[:, Z].sum().item(),
        "router_entropy": measured[:, ENTROPY].min().item(),
        "router_load": (loads.amax(1) / loads.mean(1)).max().item(),
    }  # fmt: skip


class _WithLosses(torch.autograd.Function):
    """Adds ``losses`` to the loss of the model that ``x`` goes on to.

    The figures are taken in the backward pass, which each micro-batch has once, recomputed or not.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, losses: torch.Tensor, figures: torch.Tensor, routing: Routing, layer: int
    ) -> torch.Tensor:
        ctx.routing, ctx.layer = routing, layer
        ctx.save_for_backward(losses, figures)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        losses, figures = ctx.saved_tensors
        ctx.routing.add(ctx.layer, figures)
        return gradient, torch.full_like(losses, ctx.routing.share / ctx.routing.copies), None, None, None


class Router(nn.Module):
    """The logits of the experts, in float32."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [.., width] to [.., experts]."""
        return F.linear(x.float(), local(self.weight).float())


class GroupedLinear(nn.Module):
    """A matrix for each expert."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.group: dist.ProcessGroup | None = None
        """The ranks whose tokens these matrices multiply; None if only this rank's."""
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """``x`` [n, inputs] to [n, outputs]: the first ``counts[0]`` rows by the first matrix, and so on."""
        product = grouped_product if x.is_cuda and x.dtype == torch.bfloat16 else product_by_group
        return product(x, averaged(local(self.weight), self.group), counts)


def grouped_product(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """In one kernel, which knows the groups on the device; on a GPU it takes bfloat16 only."""
    return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))


def product_by_group(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """One product after the other."""
    parts = zip(torch.split(x, counts.tolist()), weight, strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])


class Networks(nn.Module):
    """The gated linear units of this rank's experts."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width, channels, experts = settings.width, settings.expert_channels, settings.experts
        self.gate = GroupedLinear(experts, width, channels)
        self.up = GroupedLinear(experts, width, channels)
        self.down = GroupedLinear(experts, channels, width)
        self.activation = ACTIVATIONS[settings.activation]

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """``x`` [n, width], sorted by expert, of which each has so many rows as ``counts``, to the same shape."""
        y: torch.Tensor = self.down(self.activation(self.gate(x, counts)) * self.up(x, counts), counts)
        return y


class Experts(nn.Module):
    """The experts of a layer, of which each token is computed by ``experts_per_token``."""

    def __init__(self, settings: ModelSettings, layer: int, routing: Routing) -> None:
        super().__init__()
        self.router = Router(settings.width, settings.experts)
        self.networks = Networks(settings)
        self.bias: torch.Tensor | None
        self.register_buffer("bias", torch.zeros(settings.experts) if settings.router_bias else None)
        self._settings, self._layer, self._routing = settings, layer, routing

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [batch, sequence, width] to the same shape."""
        chosen, weights, x = self._route(x)
        per_token = chosen.shape[-1]
        order = chosen.flatten().argsort(stable=True)
        inverse = order.argsort()
        counts = loads(chosen.flatten()[None], self._settings.experts)[0]
        y = rows(x.flatten(0, 1), order, inverse, per_token)
        group = self._routing.group
        y = dispatch(y, counts, self.networks, group) if group else self.networks(y, counts)
        y = rows(y, inverse, order).view(*chosen.shape, -1)
        return (y * weights[..., None].to(y.dtype)).sum(-2)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The experts of each token and their weights [batch, sequence, experts_per_token]; ``x`` with the losses."""
        settings = self._settings
        logits = self.router(x)
        gates = logits.softmax(-1) if settings.router == "softmax" else logits.sigmoid()
        scores = gates.detach() if self.bias is None else gates.detach() + self.bias
        chosen = within_groups(scores, settings).topk(settings.experts_per_token)
        weights = gates.gather(-1, chosen.indices)
        if settings.router_normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if torch.is_grad_enabled():
            x = self._with_losses(x, logits, gates, chosen.indices)
        return chosen.indices, weights * settings.router_scale, x

    def _with_losses(
        self, x: torch.Tensor, logits: torch.Tensor, gates: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        routing, experts = self._routing, self._settings.experts
        counts = loads(chosen.flatten(1), experts)
        shares = gates / gates.sum(-1, keepdim=True)
        balance = routing.balance_loss * balance_loss(counts, shares, routing.context)
        z = routing.z_loss * logits.logsumexp(-1).square().mean()
        entropy = torch.special.entr(shares.detach()).sum(-1).mean() / math.log(max(experts, 2))
        means = torch.stack((balance.detach(), z.detach(), entropy))
        figures = torch.cat((means.double(), counts.sum(0).double()))
        changed: torch.Tensor = _WithLosses.apply(x, balance + z, figures, routing, self._layer)  # type: ignore[no-untyped-call]
        return changed

    @torch.no_grad()
    def move_bias(self, measured: torch.Tensor, rate: float) -> None:
        """Raise the biases of experts with less than the mean load of the row ``measured``, and lower the others'."""
        if self.bias is not None:
            load = measured[LOADS:].to(self.bias.device)
            self.bias += rate * (load.mean() - load).sign().to(self.bias.dtype)


class MixtureOfExperts(nn.Module):
    """Routed experts, and those that compute every token, which are one network of their width together."""

    def __init__(self, settings: ModelSettings, layer: int, routing: Routing) -> None:
        super().__init__()
        self.experts = Experts(settings, layer, routing)
        shared = settings.shared_experts * settings.expert_channels
        self.shared = FeedForward(settings, shared) if shared else None
        self.shared_gate = nn.Linear(settings.width, 1, bias=False) if shared and settings.shared_gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [batch, sequence, width] to the same shape."""
        y: torch.Tensor = self.experts(x)
        if self.shared:
            y = y + (self.shared(x) * self.shared_gate(x).sigmoid() if self.shared_gate else self.shared(x))
        return y


def within_groups(scores: torch.Tensor, settings: ModelSettings) -> torch.Tensor:
    """``scores`` [.., experts] with -inf outside of a token's best groups (DeepSeek-V2, 2.2.2; V3, 2.1.2)."""
    if settings.router_groups == 1:
        return scores
    groups = scores.view(*scores.shape[:-1], settings.router_groups, -1)
    best = groups.topk(2 if settings.router == "sigmoid" else 1).values.sum(-1)
    chosen = best.topk(settings.groups_per_token).indices
    hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
    return groups.masked_fill(hidden[..., None], -math.inf).flatten(-2)


def loads(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert is among ``chosen`` [rows, n], by row: int64 [rows, experts]."""
    values = torch.arange(experts, device=chosen.device).expand(len(chosen), -1).contiguous()
    ends = torch.searchsorted(chosen.sort().values, values, right=True)
    return ends.diff(prepend=torch.zeros_like(ends[:, :1]))


def balance_loss(counts: torch.Tensor, shares: torch.Tensor, context: Context = None) -> torch.Tensor:
    """How unevenly each sequence is spread over the experts, 1 if evenly: the mean over sequences.

    ``counts`` [batch, experts] is how often each expert was chosen in a sequence, ``shares`` [batch, sequence, experts]
    what the router gives it of each token (Switch Transformer, arXiv 2101.03961, eq. 4; by sequence as in DeepSeek-V3,
    so that it does not depend on how sequences are spread over micro-batches and ranks).
    """
    if context is not None:
        counts = counts.clone()
        dist.all_reduce(counts, group=context.get_group())
    chosen = counts / counts.sum(-1, keepdim=True)
    return counts.shape[-1] * (chosen * shares.mean(1)).sum(-1).mean()


Apply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
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


def dispatch(x: torch.Tensor, counts: torch.Tensor, networks: Apply, group: dist.ProcessGroup) -> torch.Tensor:
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
