"""Next-token loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor, z_loss: float = 0.0) -> torch.Tensor:
    """Mean cross-entropy in nats per token, plus ``z_loss`` times the mean of log(Z)^2 (PaLM, arXiv 2204.02311, 5).

    ``logits`` [..., vocab], ``targets`` [...] of token ids; computed in float32.
    """
    logits = logits.flatten(0, -2).float()
    loss = F.cross_entropy(logits, targets.flatten())
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(logits, dim=-1).square().mean()
    return loss
