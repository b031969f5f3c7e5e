"""Dual-chunk attention against its definition, written out pair by pair, and against plain attention."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.trainer.attention import Cache, attend, attention_inputs
from opsd.trainer.config import ConfigError, load
from opsd.trainer.documents import within_documents
from opsd.trainer.dual_chunk import ROWS, Block, dual_chunks
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings

torch.set_num_threads(1)

SHAPE = ModelSettings(
    layers=2, width=24, heads=4, kv_heads=2, head_dim=6, ffn=16, vocab=40, pattern=("dual_chunk",), dual_chunk=7,
    dual_chunk_local=3, rope_theta=100.0,
)  # fmt: skip
DOCUMENTS = st.builds(
    lambda length, starts: torch.tensor([at in starts for at in range(length)]).cumsum(0).int()[None],
    st.integers(1, 40),
    st.sets(st.integers(1, 39), max_size=2),
)
"""Mostly longer than a chunk."""


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: list[int], shape: ModelSettings, scale: float
) -> torch.Tensor:
    """What the paper defines for one head: ``q``, ``k`` and ``v`` [tokens, channels] without positions."""
    size, half = shape.dual_chunk - shape.dual_chunk_local, shape.rotary_channels // 2

    def score(query: int, key: int) -> float:
        begin = documents.index(documents[query])
        query_at, key_at = query - begin, key - begin
        apart = query_at // size - key_at // size
        farthest = min(2 * size - 1, shape.dual_chunk)
        stands = [query_at % size, min(query_at % size + size, farthest), farthest][min(apart, 2)]
        distance = stands - key_at % size
        total = math.fsum((q[query, 2 * half :] * k[key, 2 * half :]).tolist())
        for channel in range(half):
            one, other = (complex(x[channel], x[channel + half]) for x in (q[query], k[key]))
            turned = one * cmath.exp(1j * distance * shape.rope_theta ** (-channel / half))
            total += (turned * other.conjugate()).real
        positions = shape.dual_chunk_positions
        grown = max(1.0, 0.1 * math.log((query_at + 1) / positions) + 1) if positions else 1.0
        bound = shape.attention_softcap
        return bound * math.tanh(total * scale * grown / bound) if bound else total * scale * grown

    rows = []
    for query, document in enumerate(documents):
        keys = [key for key in range(query + 1) if documents[key] == document]
        weights = torch.tensor([score(query, key) for key in keys], dtype=torch.float64).softmax(0)
        rows.append(weights @ v[keys].double())
    return torch.stack(rows)


@settings(max_examples=40, deadline=None)
@given(
    documents=DOCUMENTS, size=st.integers(1, 6), local=st.integers(0, 6), positions=st.sampled_from([0, 3]),
    softcap=st.sampled_from([0.0, 0.7]), rope_dim=st.sampled_from([0, 4]),
)  # fmt: skip
def test_it_is_what_the_paper_defines(
    documents: torch.Tensor, size: int, local: int, positions: int, softcap: float, rope_dim: int
) -> None:
    """For any chunks and documents, with bounds, growing scores and channels without positions."""
    shape = SHAPE.model_copy(update={
        "dual_chunk": size + local, "dual_chunk_local": local, "dual_chunk_positions": positions,
        "attention_softcap": softcap, "rope_dim": rope_dim,
    })  # fmt: skip
    torch.manual_seed(documents.shape[1])
    q, k, v = (torch.randn(1, documents.shape[1], heads, 6) for heads in (4, 2, 2))
    inputs = attention_inputs(documents, shape)
    turned = (inputs.rotate(x, "dual_chunk").transpose(1, 2) for x in (q, k))
    found = attend(*turned, v.transpose(1, 2), inputs.masks["dual_chunk"], None, 0.4, softcap)
    for head in range(4):
        expected = written_out(q[0, :, head], k[0, :, head // 2], v[0, :, head // 2], documents[0].tolist(), shape, 0.4)
        torch.testing.assert_close(found[0, head].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("latent", [{}, {"kv_heads": 4, "kv_rank": 11, "rope_dim": 4, "value_dim": 5}])
def test_within_a_chunk_it_is_plain_attention(latent: dict[str, int]) -> None:
    """Documents no longer than a chunk give the logits and gradients of the same weights with plain attention."""
    shape = SHAPE.model_copy(update={"dual_chunk": 12, "dual_chunk_local": 4, "dual_chunk_positions": 8} | latent)
    dual, plain = Decoder(shape), Decoder(shape.model_copy(update={"pattern": ("global",)}))
    plain.load_state_dict(dual.state_dict())
    tokens, documents = (
        torch.randint(0, 40, (2, 20)),
        torch.tensor([[0] * 8 + [1] * 8 + [2] * 4, [3] * 5 + [4] * 8 + [5] * 7]),
    )
    torch.testing.assert_close(dual(tokens, documents), plain(tokens, documents), atol=1e-5, rtol=1e-5)
    for model in (dual, plain):
        model(tokens, documents, tokens).sum().backward()
    for one, other in zip(dual.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_a_long_document_reads_alike_wherever_it_is() -> None:
    """Its logits depend on no other document of the sequence, nor on where its chunks begin there."""
    torch.manual_seed(1)
    model, tokens = Decoder(SHAPE), torch.randint(0, 40, (1, 30))
    with torch.no_grad():
        alone = model(tokens[:, 5:], torch.zeros(1, 25, dtype=torch.int32))
        packed = model(tokens, (torch.arange(30) >= 5).int()[None])
        plain = Decoder(SHAPE.model_copy(update={"pattern": ("global",)}))
        plain.load_state_dict(model.state_dict())
        other = plain(tokens, (torch.arange(30) >= 5).int()[None])
    torch.testing.assert_close(packed[:, 5:], alone, atol=1e-5, rtol=1e-5)
    assert (packed - other).abs().max() > 1e-4, "beyond a chunk it is not plain attention"


@settings(max_examples=20, deadline=None)
@given(length=st.integers(2, 30), share=st.floats(0, 1))
def test_reading_on_from_a_cache(length: int, share: float) -> None:
    """Tokens that follow cached ones get the logits that they get when all are read at once."""
    past = max(1, int(share * (length - 1)))
    torch.manual_seed(length)
    model, tokens = Decoder(SHAPE.model_copy(update={"dual_chunk_positions": 5})), torch.randint(0, 40, (1, length))
    documents, cache = torch.zeros(1, length, dtype=torch.int32), Cache()
    with torch.no_grad():
        model(tokens[:, :past], documents[:, :past], cache=cache)
        later = model(tokens[:, past:], documents, cache=cache)
        torch.testing.assert_close(later, model(tokens, documents)[:, past:], atol=1e-5, rtol=1e-5)


def test_scores_of_a_few_queries_are_in_memory_at_a_time() -> None:
    """Every query is in one block, of its own chunk, and no block has more than ``ROWS``."""
    shape = SHAPE.model_copy(update={"dual_chunk": 700, "dual_chunk_local": 100})
    documents = (torch.arange(2000) >= 650).int()[None]
    _, found = dual_chunks(documents, shape)
    blocks = found.blocks[0]
    assert [block.begin for block in blocks[1:]] == [block.end for block in blocks[:-1]]
    assert (blocks[0].begin, blocks[-1].end) == (0, 2000)
    assert max(block.end - block.begin for block in blocks) == ROWS
    assert blocks[-1] == Block(1850, 2000, 1850, 1250, 650)
    at = within_documents(documents)[0]
    assert all(at[block.chunk] % 600 == 0 and block.begin - block.chunk < 600 for block in blocks)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.dual_chunk=64"], "'dual_chunk' in model.pattern need each other"),
        (['model.pattern=["dual_chunk"]'], "'dual_chunk' in model.pattern need each other"),
        (["model.dual_chunk_local=64"], "model.dual_chunk_local needs model.dual_chunk"),
        (
            ['model.pattern=["dual_chunk"]', "model.dual_chunk=64", "model.dual_chunk_local=64"],
            "model.dual_chunk_local 64 is not below model.dual_chunk 64",
        ),
        (
            ['model.pattern=["dual_chunk"]', "model.dual_chunk=64", "parallel.cp=2"],
            "parallel.cp does not work with layers of the kind 'dual_chunk'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], text: str) -> None:
    """In one sentence that names the setting."""
    with pytest.raises(ConfigError, match=text):
        load("tiny", ["data.shards=/data", *overrides], {})
