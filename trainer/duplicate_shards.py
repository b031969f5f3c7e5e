"""``python -m opsd.trainer.duplicate_shards PATH``: finds tensors whose tensor-parallel shards are equal.

A checkpoint does not say how its tensors were split, so every number of shards is tried along the first two dimensions.
Independently drawn shards have no rows in common. Some copies are no fault: repeated heads of keys and values, rows of
tokens that never occurred, tables of positions, and masks.

Prints one JSON object per line: ``{"tensor", "dimension", "shards", "copies"}``, and at the end ``{"tensors":
examined}``. If PATH cannot be read, or has nothing to compare, it prints ``{"error": sentence}``. Users call it as
``opsd checkpoint audit``.
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
KEYS_OR_VALUES = re.compile(r"(?:^|[._])(?:k|v|kv|key|value|key_value)(?:_?proj|s)?(?:[._]|$)", re.IGNORECASE)
"""Names of projections to keys or values, whose heads may have been repeated (GQA made MHA)."""
SMOOTH = 0.5
"""Mean correlation of neighbouring rows from which a matrix was not drawn: positions, sinusoids, masks."""
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


def matrix_of(stored: Stored) -> torch.Tensor | None:
    """The tensor if it may have been drawn in shards: a matrix of the model, of which there is something."""
    key = stored.name.rpartition(":")[2]  # files may be named after all that they have: model_optim_rng.pt
    if len(stored.shape) - bool(stored.ranks) < 2 or 0 in stored.shape or MOMENTS.search(key):
        return None
    values = stored.read()
    return values.float() if values.is_floating_point() else None


def examine(stored: Stored, values: torch.Tensor) -> Finding | None:
    """The copies in ``values``, the matrix of ``stored``; None without any.

    Three dimensions are those of experts: each may be a copy, and each may be put together from shards.
    """
    if stored.ranks:
        values = values.flatten(1)
        return _compare(stored.name, values, values.std(1) > 0, 0, [stored.ranks])
    each = enumerate(values) if values.dim() == 3 else ()
    matrices = [(stored.name, values.flatten(1)), *((f"{stored.name}.{number}", matrix) for number, matrix in each)]
    return next((finding for name, matrix in matrices if (finding := _copies_in(name, matrix))), None)


def _copies_in(name: str, values: torch.Tensor) -> Finding | None:
    """The shards of ``values`` [rows, columns] that are alike."""
    values = _without_repeated_rows(values)
    if _is_smooth(values):
        return None
    # Values that all rows or columns share make independent shards look alike.
    centred = values - values.mean(0)
    centred -= centred.mean(1, keepdim=True)
    for dimension in (0, 1):
        for pieces in _largest_divisors(values.shape[dimension]):
            rows, raw = (torch.stack(matrix.chunk(pieces, dimension)).flatten(1) for matrix in (centred, values))
            counts = [count for count in range(pieces, 1, -1) if pieces % count == 0]
            finding = _compare(name, rows, raw.std(1) > 0, dimension, counts)
            if finding and not _repeats_heads(finding):
                return finding
    return None


def _largest_divisors(length: int) -> list[int]:
    """Divisors of ``length`` up to MAX_SHARDS that divide no larger one of them: each number of shards divides one."""
    divisors = [number for number in range(min(MAX_SHARDS, length), 1, -1) if length % number == 0]
    return [number for number in divisors if not any(other > number and other % number == 0 for other in divisors)]


def _without_repeated_rows(values: torch.Tensor) -> torch.Tensor:
    """``values`` with zeros where a row equals the one above or below: tokens that never occurred, or padding."""
    same = (values[1:] == values[:-1]).all(1)
    if not same.any():
        return values
    repeated = torch.zeros(len(values), dtype=torch.bool)
    repeated[1:] |= same
    repeated[:-1] |= same
    return values.masked_fill(repeated[:, None], 0.0)


def _is_smooth(values: torch.Tensor) -> bool:
    """Whether neighbouring rows are alike throughout, as in no matrix that was drawn."""
    rows = values - values.mean(0)
    norms = rows.norm(dim=1).clamp(min=1e-30)
    return bool(((rows[1:] * rows[:-1]).sum(1) / (norms[1:] * norms[:-1])).mean() > SMOOTH)


def _repeats_heads(finding: Finding) -> bool:
    """Whether some, but not all, heads of keys or values are copies: each was repeated for a group of queries."""
    return len(finding.copies) < finding.shards and bool(KEYS_OR_VALUES.search(finding.tensor))


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
    examined = compared = 0
    try:
        for stored in stored_tensors(Path(sys.argv[1])):
            examined += 1
            if (values := matrix_of(stored)) is None:
                continue
            compared += 1
            if finding := examine(stored, values):
                print(json.dumps(asdict(finding)), flush=True)
        if not compared:
            raise FormatError(
                f"{sys.argv[1]} has no matrices that could be compared ({examined} tensors); DeepSpeed's ZeRO-3 keeps "
                "them in pieces, which zero_to_fp32.py puts together"
            )
        print(json.dumps({"tensors": examined}))
    except FormatError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
