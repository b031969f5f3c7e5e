"""Checksums of the bits of tensors, computed on their device."""

from __future__ import annotations

from functools import cache

import torch

_BLOCK = 1 << 20
_EVEN = 0x1E3779B97F4A7C16
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(values: torch.Tensor) -> str:
    """``bit_sum`` as 16 hex digits; waits for the device."""
    return text_of(int(bit_sum(values).item()))


def text_of(total: int) -> str:
    """An int64 sum as 16 hex digits."""
    return f"{total & (1 << 64) - 1:016x}"


@torch.no_grad()
def bit_sum(values: torch.Tensor) -> torch.Tensor:
    """A scalar int64 on their device, over the bits of ``values`` and their order; detects any one changed bit.

    The sum modulo 2^64 of each word times odd numbers for its block and its place in the block: exact in integers, in
    any order of summation.
    """
    words = values.contiguous().flatten()
    begin = words.storage_offset() * words.element_size()
    words = words.view(torch.int32 if words.nbytes % 4 == begin % 4 == 0 else _WORDS[words.element_size()])
    places = _odd_numbers(words.device)
    sums = [(block * places[: len(block)]).sum() for block in torch.split(words, _BLOCK)]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=words.device)
    return sums[0] if len(sums) == 1 else (torch.stack(sums) * places[: len(sums)]).sum()


@cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(_BLOCK, device=device) * _EVEN + 1
