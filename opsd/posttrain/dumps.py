"""Batches of anybody's loader in a file, beside their raw rows: what ``opsd audit batches`` reads.

The batches are ``.safetensors``, or ``.pt`` with a dict or a list of dicts of tensors, which is loaded without
executing anything in it (``weights_only``). In a safetensors file of several batches the names are ``0.input_ids``,
``0.labels``, ``1.input_ids`` and so on. The rows are JSON lines, in the order of the batches if nothing is packed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opsd.posttrain.audit import Group
from opsd.posttrain.batches import read_batch
from opsd.posttrain.rows import Example

Batch = dict[str, Any]


class DumpError(Exception):
    """A file cannot be read as batches or rows; the message says which and why."""


def read_batches(path: Path) -> list[Batch]:
    """The batches in ``path``. Raises DumpError."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return _numbered(load_file(path))
        import torch

        loaded = torch.load(path, weights_only=True, map_location="cpu")
    except ImportError as error:
        raise DumpError(f"{path} needs {error.name}, which is not installed here") from error
    except Exception as error:  # a damaged file raises nearly anything
        said = str(error).strip().partition("\n")[0]
        raise DumpError(f"{path} cannot be read as .safetensors or .pt: {said:.200}") from error
    batches = loaded if isinstance(loaded, list) else [loaded]
    if not batches or not all(isinstance(batch, dict) for batch in batches):
        raise DumpError(f"{path} has neither a dict of tensors nor a list of such dicts")
    return batches


def _numbered(tensors: Mapping[str, Any]) -> list[Batch]:
    found: dict[int, Batch] = {}
    for name, value in tensors.items():
        number, dot, rest = name.partition(".")
        at = int(number) if dot and number.isdecimal() else 0
        found.setdefault(at, {})[rest if dot and number.isdecimal() else name] = value
    return [found[at] for at in sorted(found)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows in ``path``. Raises DumpError."""
    rows = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise DumpError(f"{path}:{number} is no JSON object")
                    rows.append(row)
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DumpError(f"{path} is no text in UTF-8") from error
    except ValueError as error:
        raise DumpError(f"{path}:{number} is no JSON object: {error}") from error
    return rows


def groups_of(batches: Sequence[Batch], rows: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Rows and documents: in their order if their numbers fit, else matched by text. Raises ValueError."""
    examples = [Example.of(row, number) for number, row in enumerate(rows)]
    pairs = bool(examples) and all(each is not None and each.kind == "pair" for each in examples)
    read = [read_batch(batch, pairs=pairs) for batch in batches]
    sides = 2 if any(document.side == "rejected" for documents in read for document in documents) else 1
    if sum(map(len, read)) != len(examples) * sides:
        return [Group(examples, [document for documents in read for document in documents], aligned=False)]
    groups, begin = [], 0
    for documents in read:
        count = len(documents) // sides
        groups.append(Group(examples[begin : begin + count], documents))
        begin += count
    return groups
