"""``python -m opsd.trainer.duplicate_shards PATH``: finds tensors whose tensor-parallel shards are equal.

A checkpoint does not say how its tensors were split, so every power of two is tried along the first two dimensions.
Independently drawn shards have no rows in common. Prints one JSON object per line: ``{"tensor", "dimension", "shards",
"copies"}`` or, at the end, ``{"tensors": examined}``; ``{"error": sentence}`` if PATH cannot be read. ``opsd checkpoint
audit`` is the user's command.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from opsd.trainer.tensors import FormatError, Stored, stored_tensors

MAX_SHARDS = 64
SIMILAR = 0.99
"""Correlation from which shards count as copies although their bits differ.

Rounding makes equal weights drift apart during training. Between independent shards of a thousand numbers it stays
below 0.2.
"""
MOMENTS = re.compile(r"exp_avg|optim|momentum|adam", re.IGNORECASE)
"""Names of optimiser state, which is skipped.

Heads that share keys and values have nearly the same gradients while attention is still even, and copies show in the
weights.
"""
MIN_ELEMENTS = 32
"""Least number of elements of a shard for a comparison."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A tensor whose shards ``copies``, of ``shards`` along ``dimension``, are alike.

    ``correlation`` is the lowest between them, 1 if their bits are equal.
    """

    tensor: str
    dimension: int
    shards: int
    copies: tuple[int, ...]
    correlation: float


def examine(stored: Stored) -> Finding | None:
    """The copies found in a tensor; None without any."""
    if len(stored.shape) - bool(stored.ranks) < 2 or 0 in stored.shape or MOMENTS.search(stored.name):
        return None
    values = stored.read()
    if not values.is_floating_point():
        return None
    values = values.float().flatten(1)
    if stored.ranks:
        return _compare(stored.name, values, values.std(1) > 0, 0, [stored.ranks])
    # What all rows or all columns have in common makes independent shards look alike.
    centred = values - values.mean(0)
    centred -= centred.mean(1, keepdim=True)
    for dimension in (0, 1):
        pieces = _power_of_two(values.shape[dimension])
        if pieces == 1:
            continue
        rows, raw = (torch.stack(matrix.chunk(pieces, dimension)).flatten(1) for matrix in (centred, values))
        counts = [2**i for i in range(pieces.bit_length() - 1, 0, -1)]
        if finding := _compare(stored.name, rows, raw.std(1) > 0, dimension, counts):
            return finding
    return None


def _power_of_two(length: int) -> int:
    return min(MAX_SHARDS, length & -length)


def _compare(name: str, rows: torch.Tensor, varied: torch.Tensor, dimension: int, counts: list[int]) -> Finding | None:
    """Compare the shards that the ``rows`` [pieces, numbers] form, for each of ``counts``, the largest first.

    Shards in which nothing is ``varied`` [pieces] are padding or unused moments, not copies. All shards alike is
    reported first, a subset otherwise.
    """
    products = (rows @ rows.T).double()
    partial: Finding | None = None
    for count in counts:
        each = len(rows) // count
        if each * rows.shape[1] < MIN_ELEMENTS:
            continue
        between = products.view(count, each, count, each).diagonal(dim1=1, dim2=3).sum(-1)
        norms = between.diagonal().clamp(min=0).sqrt()
        some = varied.view(count, each).any(1)
        correlation = between / norms.outer(norms).clamp(min=1e-300)
        alike = (correlation > SIMILAR) & some[:, None] & some[None, :]
        group = _largest(alike)
        if len(group) < 2:
            continue
        lowest = min(1.0, float(correlation[group][:, group].min()))
        finding = Finding(name, dimension, count, tuple(group), round(lowest, 6))
        if len(group) == count:
            return finding
        partial = finding
    return partial


def _largest(alike: torch.Tensor) -> list[int]:
    """The largest set of shards that are all similar to one of them."""
    row = int(alike.sum(dim=1).argmax())
    found: list[int] = alike[row].nonzero().flatten().tolist()
    return found


def main() -> None:
    """Examine the checkpoint given on the command line."""
    examined = 0
    try:
        for stored in stored_tensors(Path(sys.argv[1])):
            examined += 1
            if finding := examine(stored):
                print(json.dumps(asdict(finding)), flush=True)
        print(json.dumps({"tensors": examined}))
    except FormatError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
