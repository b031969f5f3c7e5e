"""AdamW on this rank's shards, Muon where it is wanted, and the global gradient norm."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from opsd.trainer.model import Decoder
from opsd.trainer.muon import Muon, is_orthogonalised
from opsd.trainer.regions import holders, local_part, region_of
from opsd.trainer.settings import OptimizerSettings


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
