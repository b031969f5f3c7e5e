"""Reading on from a cache: the logits of tokens are those that they have when all are read at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.trainer.attention import Cache
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings

torch.set_num_threads(1)

SHAPE = ModelSettings(layers=3, width=24, heads=4, kv_heads=2, ffn=16, vocab=40)
VARIANTS: dict[str, dict[str, Any]] = {
    "every kind": {"pattern": ("window", "nope", "chunk"), "window": 4, "chunk": 5},
    "other kinds": {"pattern": ("global", "nope_window"), "window": 3, "attention_softcap": 0.8, "qk_norm": True},
    "learnt positions": {"pattern": ("nope",), "positions": 24},
    "no documents": {"document_mask": False},
    "experts": {"experts": 4, "experts_per_token": 2},
    "latents": {"kv_heads": 4, "kv_rank": 9, "query_rank": 7, "rope_dim": 2, "value_dim": 5},
}


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=8, deadline=None)
@given(cuts=st.sets(st.integers(1, 19), min_size=1, max_size=4), begin=st.integers(0, 19))
def test_parts_are_the_whole(variant: str, cuts: set[int], begin: int) -> None:
    """However a text is cut, and with two documents in it; a branch leaves the cache as it was."""
    torch.manual_seed(begin)
    model, tokens = Decoder(SHAPE.model_copy(update=VARIANTS[variant])), torch.randint(0, 40, (2, 20))
    documents, cache = (torch.arange(20) >= begin).int()[None].expand(2, -1), Cache()
    parts = []
    with torch.no_grad():
        whole = model(tokens, documents)
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 20], strict=True):
            model(tokens[:, start:], documents, cache=cache.branch())
            parts.append(model(tokens[:, start:end], documents[:, :end], cache=cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
