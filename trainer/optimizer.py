"""AdamW on this rank's shards, and the global gradient norm."""

from __future__ import annotations

import math

import torch
from torch import nn

from opsd.trainer.model import Decoder
from opsd.trainer.regions import holders, local_part
from opsd.trainer.settings import OptimizerSettings


class Optimizer:
    """Fused AdamW; embeddings and norms have no weight decay (OLMo 2, SmolLM3).

    AdamW is elementwise, so each rank updates its own shards as plain tensors. DTensors would give the same bits but
    cost tenths of a second in the first step after every restart.
    """

    def __init__(self, model: Decoder, settings: OptimizerSettings) -> None:
        self._parameters = list(model.parameters())
        self._holders = [
            holders(value) * (2 if name in model.shared else 1) for name, value in model.named_parameters()
        ]
        self._clip = settings.clip
        self.shards = {name: nn.Parameter(local_part(value)) for name, value in model.named_parameters()}
        decayed = [shard for name, shard in self.shards.items() if _has_decay(name, shard)]
        others = [shard for name, shard in self.shards.items() if not _has_decay(name, shard)]
        self._adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        for shard in self.shards.values():
            self._adamw.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """The state of the parameter ``name``: exp_avg and exp_avg_sq shaped like its shard, step as a scalar."""
        state: dict[str, torch.Tensor] = self._adamw.state[self.shards[name]]
        return state

    @property
    def updates(self) -> torch.Tensor:
        """The number of updates so far, needed for the bias correction; a scalar."""
        return self.moments(next(iter(self.shards)))["step"]

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
            if norm > self._clip:
                gradients = [shard.grad for shard in self.shards.values() if shard.grad is not None]
                torch._foreach_mul_(gradients, self._clip / norm)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        self._adamw.zero_grad()
        return math.isfinite(norm)


def _has_decay(name: str, shard: torch.Tensor) -> bool:
    return shard.dim() > 1 and not name.startswith("embedding.")
