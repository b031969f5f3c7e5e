"""Feed-forward networks: gated linear units (arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from opsd.trainer.model_settings import ModelSettings

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
