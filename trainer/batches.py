"""Micro-batches as the model takes them."""

from __future__ import annotations

from typing import Protocol

from opsd.trainer.attention import Context, positions
from opsd.trainer.data.loader import Batch


class Batches(Protocol):
    """A source of micro-batches."""

    def next(self) -> Batch: ...


def shard_batch(batch: Batch, context: Context) -> Batch:
    """This rank's part of the tokens and targets if sequences are split over ranks; documents stay whole."""
    if context is None:
        return batch
    at = positions(batch.tokens.shape[1], context, batch.tokens.device)
    return batch._replace(tokens=batch.tokens[:, at], targets=batch.targets[:, at])
