"""Documents that share a sequence: which tokens see each other, and where each stands in its own."""

from __future__ import annotations

import torch


def visible(documents: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, window: int = 0) -> torch.Tensor:
    """The mask of keys [.., k] that a query [.., q, .] may see, bool [batch, 1, q, k].

    These are the query itself and earlier tokens of its document, of them the last ``window`` unless that is 0.
    """
    distance = queries[:, None] - keys[None, :]
    window_mask = (distance >= 0) & (distance < window) if window else distance >= 0
    return (documents[:, None, queries, None] == documents[:, None, None, keys]) & window_mask


def chunks(documents: torch.Tensor, length: int) -> torch.Tensor:
    """Number the parts of ``length`` tokens of each of the ``documents`` [batch, sequence], as if they were documents.

    They count from the start of a document, as they do when it is read by itself.
    """
    return (within_documents(documents) % length == 0).cumsum(dim=1)


def within_documents(documents: torch.Tensor) -> torch.Tensor:
    """The position of each token in its document, from 0, for ``documents`` [batch, sequence]."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return at - torch.where(first_tokens(documents), at, 0).cummax(dim=1).values


def first_tokens(documents: torch.Tensor) -> torch.Tensor:
    """Whether each token is the first of its document, for ``documents`` [batch, sequence]."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return first
