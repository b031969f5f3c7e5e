"""Layers with a state of fixed size in place of attention: gated DeltaNet and Mamba-2.

Queries, keys and values pass a short causal convolution. The state of a head, [key_dim, value_dim], decays with each
token, takes up its key and value, and is read with its query. Tokens are computed in chunks: within a chunk as
attention, between chunks through the state. Mamba-2 (arXiv 2405.21060, section 6) and gated DeltaNet (2412.06464, 3.3)
have both. Where a document begins, the state is empty, and the convolution sees zeros.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from opsd.trainer.attention import AttentionInputs
from opsd.trainer.experts import local
from opsd.trainer.model_settings import ModelSettings

CHUNK: Final = 64
"""Tokens of a chunk."""
_RATES: Final = (1.0, 16.0)
_STEPS: Final = (1e-3, 1e-1)


class Convolution(nn.Module):
    """A causal convolution of each channel by itself, which ends where its document begins, and SiLU."""

    def __init__(self, channels: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        nn.init.normal_(self.weight, std=(3 * taps) ** -0.5)
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """``x`` [batch, sequence, channels] of ``documents`` [batch, sequence] to the same shape."""
        taps = local(self.weight).flip(-1).unbind(-1)
        y = x * taps[0]
        for back, tap in enumerate(taps[1 : x.shape[1]], start=1):
            same = (documents[:, back:] == documents[:, :-back])[..., None]
            y = y + F.pad(x[:, :-back] * same, (0, 0, back, 0)) * tap
        return F.silu(y if self.bias is None else y + local(self.bias))


class Recurrent(nn.Module, ABC):
    """A layer with a state; ``mix`` says how the state changes, and ``gated`` how its output is gated."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        heads, taps, bias = settings.state_heads, settings.state_conv, settings.state_conv_bias
        keys, values = settings.state_key_width, settings.state_value_width
        self.key_dim, self.value_dim = settings.state_key_dim, settings.state_value_dim
        self.query, self.key = (nn.Linear(settings.width, keys, bias=False) for _ in range(2))
        self.value, self.gate = (nn.Linear(settings.width, values, bias=False) for _ in range(2))
        self.query_conv, self.key_conv = (Convolution(keys, taps, bias=bias) for _ in range(2))
        self.value_conv = Convolution(values, taps, bias=bias)
        self.step = nn.Linear(settings.width, heads, bias=False)
        self.step_bias, self.log_rate = (nn.Parameter(torch.zeros(heads)) for _ in range(2))
        self.output = nn.Linear(values, settings.width, bias=False)

    def forward(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """``x`` [batch, sequence, width] to the same shape."""
        documents = inputs.documents
        v = self.value_conv(self.value(x), documents).unflatten(-1, (-1, self.value_dim)).float()
        q = self._of_heads(self.query_conv(self.query(x), documents), v.shape[2])
        k = self._of_heads(self.key_conv(self.key(x), documents), v.shape[2])
        steps = F.softplus(self.step(x).float() + local(self.step_bias).float())
        decays = Decays.of(-local(self.log_rate).float().exp() * steps, documents)
        y = self.mix(q, k, v, steps, decays, x).to(x.dtype)
        output: torch.Tensor = self.output(self.gated(y, self.gate(x).view_as(y)).flatten(2))
        return output

    def _of_heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """[batch, sequence, heads, key_dim] in float32; neighbouring heads share queries and keys."""
        x = x.view(*x.shape[:2], -1, 1, self.key_dim).float()
        return x.expand(-1, -1, -1, heads // x.shape[2], -1).flatten(2, 3)

    @abstractmethod
    def mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: torch.Tensor, decays: Decays, x: torch.Tensor
    ) -> torch.Tensor:
        """The output of the states, like ``v`` [batch, sequence, heads, value_dim], in float32.

        ``q`` and ``k`` are [batch, sequence, heads, key_dim], ``steps`` [batch, sequence, heads], ``x`` the layer's
        input.
        """

    @abstractmethod
    def gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``y`` and ``gate`` [batch, sequence, heads, value_dim] to the same shape."""


@dataclass(frozen=True, slots=True)
class Decays:
    """The factors by which states decay between tokens, float32; 0 if a document begins between them.

    ``within`` [batch, heads, chunks, to, from] is between two tokens of a chunk, 0 for later ones. ``since``
    [batch, heads, chunks, token] is that of the state before the chunk.
    """

    within: torch.Tensor
    since: torch.Tensor

    @classmethod
    def of(cls, logarithms: torch.Tensor, documents: torch.Tensor) -> Decays:
        """From the ``logarithms`` of the decay at each token [batch, sequence, heads]."""
        steps = chunked(logarithms)
        sums = steps @ torch.ones_like(steps[0, 0, 0].expand(CHUNK, -1)).triu()  # cumsum is not deterministic on a GPU
        document = chunked(documents[..., None])
        before = F.pad(document[..., -1:], (0, 0, 1, 0))[:, :, :-1]  # the first chunk's does not matter: no state yet
        same = (document[..., None] == document[..., None, :]).tril()
        within = (sums[..., None] - sums[..., None, :]).masked_fill(~same, -math.inf).exp()
        return cls(within, sums.exp() * (document == before))


def chunked(x: torch.Tensor) -> torch.Tensor:
    """``x`` [batch, sequence, heads, ..] as [batch, heads, chunks, CHUNK, ..], filled up with zeros."""
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % CHUNK))
    return x.view(len(x), -1, CHUNK, *x.shape[2:]).movedim(3, 1)


def joined(x: torch.Tensor, length: int) -> torch.Tensor:
    """The inverse of ``chunked`` for a sequence of ``length``."""
    return x.movedim(1, 3).flatten(1, 2)[:, :length]


def _draw_rates(values: torch.Tensor, generator: torch.Generator) -> None:
    values.uniform_(*_RATES, generator=generator).log_()


def _draw_steps(values: torch.Tensor, generator: torch.Generator) -> None:
    low, high = map(math.log, _STEPS)
    steps = values.uniform_(low, high, generator=generator).exp_()
    values.copy_(steps + torch.log(-torch.expm1(-steps)))


DRAWS: Final[Mapping[str, Callable[[torch.Tensor, torch.Generator], None]]] = {
    "log_rate": _draw_rates, "step_bias": _draw_steps,
}  # fmt: skip
"""How vectors are drawn: rates of decay from 1 to 16, the softplus of steps from 0.001 to 0.1 (Mamba-2)."""


LENGTH_EPS: Final = 1e-6
"""Added to the squared length of queries and keys, as in flash-linear-attention."""


class GatedDeltaNet(Recurrent):
    """Its output is normalised by head, then gated, as in Qwen3-Next."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.write = nn.Linear(settings.width, settings.state_heads, bias=False)
        self.norm = nn.RMSNorm(settings.state_value_dim, settings.norm_eps)

    def mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: torch.Tensor, decays: Decays, x: torch.Tensor
    ) -> torch.Tensor:
        """See ``Recurrent``; the share of the state that is replaced has a projection of its own."""
        shares = self.write(x).float().sigmoid()
        return gated_delta_rule(_of_length_1(q) * q.shape[-1] ** -0.5, _of_length_1(k), v, shares, decays)

    def gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.norm(y)
        return normalised * F.silu(gate)


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shares: torch.Tensor, decays: Decays
) -> torch.Tensor:
    """Read by ``q`` what the state S has after S = decay S + share k (v - k decay S) (equation 10 there).

    ``q`` and ``k`` are [batch, sequence, heads, key_dim], ``v`` and the result [batch, sequence, heads, value_dim],
    ``shares`` [batch, sequence, heads]. What the tokens of a chunk write depends on earlier ones: a triangular system.
    """
    length, size = v.shape[1], v.shape[-1]
    q, k, v, share = chunked(q), chunked(k), chunked(v), chunked(shares)[..., None]
    since = decays.since[..., None]
    system = share * (k @ k.mT) * decays.within
    wanted = torch.cat((share * v, share * k * since), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    written, replaced = solved.split((size, k.shape[-1]), dim=-1)
    scores, q = (q @ k.mT) * decays.within, q * since
    k = k * decays.within[..., -1, :, None]
    state = q.new_zeros(*k.shape[:2], k.shape[-1], size)
    outputs = []
    for chunk in range(k.shape[2]):
        new = written[:, :, chunk] - replaced[:, :, chunk] @ state
        outputs.append(q[:, :, chunk] @ state + scores[:, :, chunk] @ new)
        state = state * since[:, :, chunk, -1:] + k[:, :, chunk].mT @ new
    return joined(torch.stack(outputs, dim=2), length)


def _of_length_1(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


class Mamba(Recurrent):
    """Its output is gated, then normalised over the heads that share queries and keys."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.skip = nn.Parameter(torch.ones(settings.state_heads))
        self.norm = GroupNorm(settings.state_value_width, settings.state_shared_by, settings.norm_eps)

    def mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: torch.Tensor, decays: Decays, x: torch.Tensor
    ) -> torch.Tensor:
        """See ``Recurrent``; values also pass the state by."""
        return state_space(q, k, v * steps[..., None], decays) + local(self.skip).float()[:, None] * v

    def gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.norm(y * F.silu(gate))
        return normalised


class GroupNorm(nn.Module):
    """RMSNorm over the channels of ``heads`` at a time, with weights for all ``channels``."""

    def __init__(self, channels: int, heads: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self._heads, self._eps = heads, eps

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """``y`` [batch, sequence, heads, channels] to the same shape."""
        groups = y.view(*y.shape[:2], -1, self._heads, y.shape[-1])
        return F.rms_norm(groups, groups.shape[-2:], None, self._eps).view_as(y) * local(self.weight).view(y.shape[2:])


def state_space(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: Decays) -> torch.Tensor:
    """Read by ``q`` what the state S has after S = decay S + k v.

    ``q`` and ``k`` are [batch, sequence, heads, key_dim], ``v`` and the result [batch, sequence, heads, value_dim].
    """
    length = v.shape[1]
    q, k, v = chunked(q), chunked(k), chunked(v)
    added = (k * decays.within[..., -1, :, None]).mT @ v
    state, before = torch.zeros_like(added[:, :, 0]), []
    for chunk in range(k.shape[2]):
        before.append(state)
        state = state * decays.since[:, :, chunk, -1, None, None] + added[:, :, chunk]
    within = ((q @ k.mT) * decays.within) @ v
    return joined(within + (q * decays.since[..., None]) @ torch.stack(before, dim=2), length)
