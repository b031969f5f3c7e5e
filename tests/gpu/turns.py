"""Preflight's burn and torch.mm on one device, by turns, because a GPU slows down as it gets hot."""

from __future__ import annotations

import time
from statistics import median

import torch

from opsd.preflight.checks.gpu_burn import bf16, burn, size_of
from opsd.preflight.gpus import synchronise


def in_turns(device: torch.device, seconds: float, turns: int = 4) -> tuple[float, float]:
    """FLOP/s of the burn and of torch.mm, which have ``seconds`` each: medians over the last half of the turns."""
    size, each = size_of(device), seconds / turns
    ours, plain = [], []
    for _ in range(turns):
        torch.cuda.empty_cache()
        ours.append(burn(device, bf16, seconds=each, size=size, progress=lambda _share: None).flops)
        left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        rates, until = [], time.perf_counter() + each
        while (began := time.perf_counter()) < until:
            for _ in range(50):
                torch.mm(left, right)
            synchronise(device)
            rates.append(50 * 2.0 * size**3 / (time.perf_counter() - began))
        plain.append(median(rates))
        del left, right
    return median(ours[turns // 2 :]), median(plain[turns // 2 :])
