"""Whether documents that are packed into one row see each other: measured in the model, not read from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opsd.posttrain.audit import Finding
from opsd.posttrain.batches import read_batch

TOLERANCE = 1e-3
"""Of the largest logit: kernels add in another order when shapes and values are others, and bf16 has 8 bits."""
_MODEL_INPUTS = (
    "input_ids", "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "seq_idx",
)  # fmt: skip


def first_packed(batch: Mapping[str, Any]) -> tuple[int, int] | None:
    """The row that has several documents by the batch's own word, and the length of its first one; None if none has."""
    rows: list[list[int]] = []
    for document in read_batch(batch):
        if document.begins:
            rows.append([])
        rows[-1].append(len(document.ids))
    return next(((row, lengths[0]) for row, lengths in enumerate(rows) if len(lengths) > 1), None)


def leak(model: torch.nn.Module, batch: Mapping[str, Any], row: int, first: int) -> tuple[float, float]:
    """How far logits behind the first ``first`` tokens of ``row`` move when these change, and the largest logit."""
    device = next(model.parameters()).device
    inputs = {name: batch[name] for name in _MODEL_INPUTS if batch.get(name) is not None}
    inputs = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    changed = inputs["input_ids"].clone()
    changed[row, :first] = (changed[row, :first] + 1) % (int(changed.max()) + 1)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            before = model(**inputs, use_cache=False).logits[row, first:].float()
            after = model(**{**inputs, "input_ids": changed}, use_cache=False).logits[row, first:].float()
    finally:
        model.train(training)
    return float((before - after).abs().max()), float(before.abs().max())


def audit_packing(model: torch.nn.Module, batch: Mapping[str, Any], row: int, first: int) -> list[Finding]:
    """A finding if documents behind the first one, of ``first`` tokens, of a packed ``row`` see it."""
    moved, largest = leak(model, batch, row, first)
    if moved <= TOLERANCE * max(1.0, largest):
        return []
    return [
        Finding(
            "packing_leaks",
            "Documents that are packed into one row see each other: "
            f"changing the first moves logits of the next by {moved:.2g}.",
            "Use an attention that takes position_ids as boundaries (attn_implementation), or switch packing off.",
        )
    ]
