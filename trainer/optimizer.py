"""AdamW and the global gradient norm."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import OptimizerSettings
from trainer.parallel import local_gradients


def adamw(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Fused AdamW with its state allocated at once; embeddings and norms have no weight decay (OLMo 2, SmolLM3)."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (plain if parameter.dim() == 1 or name.startswith("embedding.") else decayed).append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def set_updates(optimizer: torch.optim.Optimizer, updates: torch.Tensor) -> None:
    """Set the number of updates taken, which the bias correction depends on, of every parameter."""
    for moments in optimizer.state.values():
        moments["step"].copy_(updates.squeeze())


def squared_norm(model: nn.Module) -> torch.Tensor:
    """Sum of squares of this rank's part of the gradients, float64; summed over ranks it is the global norm squared."""
    norms = torch._foreach_norm(list(local_gradients(model)))
    return torch.stack(norms).double().square().sum()


def clip(model: nn.Module, norm: float, limit: float) -> None:
    """Scale the gradients so that their global ``norm`` is at most ``limit``."""
    if norm > limit:
        torch._foreach_mul_(list(local_gradients(model)), limit / norm)
