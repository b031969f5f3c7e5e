"""The model: who sees whom, where positions are, what is shared, and how large it is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.trainer.attention import AttentionInputs, attention_inputs
from opsd.trainer.config import load
from opsd.trainer.counts import flops_per_token, parameters
from opsd.trainer.documents import visible
from opsd.trainer.model import Attention, Decoder, count_parameters, init_std
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.rotary import rotary_angles, rotate, rotation_factors

torch.set_num_threads(1)  # threads cost more than they bring for matrices this small

SETTINGS = ModelSettings(layers=4, width=32, heads=4, kv_heads=2, ffn=48, vocab=64)


def decoder(**changes: object) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SETTINGS.model_copy(update=changes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def tokens_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SETTINGS.vocab, shape, generator=torch.Generator().manual_seed(seed))


def plain(length: int) -> AttentionInputs:
    """Causal attention over one document."""
    return attention_inputs(
        torch.zeros(1, length, dtype=torch.int32), SETTINGS.model_copy(update={"document_mask": False})
    )


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(1, 15), seed=st.integers(0, 99))
def test_documents_do_not_see_each_other(cut: int, seed: int) -> None:
    """What stands in one document changes nothing in another of the same sequence, before or after it."""
    model, documents = decoder(), (torch.arange(16) >= cut).int()[None]
    one, other = tokens_of(1, 16, seed=seed), tokens_of(1, 16, seed=seed + 100)
    mixed = torch.cat((one[:, :cut], other[:, cut:]), dim=1)
    with torch.no_grad():
        a, b, m = (model(tokens, documents) for tokens in (one, other, mixed))
    assert torch.equal(m[:, :cut], a[:, :cut])
    assert torch.equal(m[:, cut:], b[:, cut:])


def test_a_document_is_as_if_alone() -> None:
    """A packed document gives the logits that it gives alone, although its positions are other ones."""
    model, tokens = decoder(), tokens_of(1, 16)
    documents = (torch.arange(16) >= 7).int()[None]
    with torch.no_grad():
        packed = model(tokens, documents)[:, 7:]
        alone = model(tokens[:, 7:], torch.zeros(1, 9, dtype=torch.int32))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_without_the_mask_documents_do_see_each_other() -> None:
    """document_mask = false is plain causal attention."""
    model, documents = decoder(document_mask=False), (torch.arange(16) >= 7).int()[None]
    one = tokens_of(1, 16)
    other = torch.cat((tokens_of(1, 7, seed=9), one[:, 7:]), dim=1)
    with torch.no_grad():
        assert not torch.allclose(model(one, documents)[:, 7:], model(other, documents)[:, 7:])


def test_the_future_is_hidden() -> None:
    """Later tokens of a document change nothing before them."""
    model, documents = decoder(), torch.zeros(1, 16, dtype=torch.int32)
    one = tokens_of(1, 16)
    other = torch.cat((one[:, :10], tokens_of(1, 6, seed=9)), dim=1)
    with torch.no_grad():
        assert torch.equal(model(one, documents)[:, :10], model(other, documents)[:, :10])


def test_mask_is_the_own_documents_past() -> None:
    """The mask of two documents is two lower triangles."""
    mask = visible(torch.tensor([[0, 0, 1, 1, 1]]), torch.arange(5), torch.arange(5))
    expected = torch.block_diag(torch.ones(2, 2).tril(), torch.ones(3, 3).tril()).bool()
    assert torch.equal(mask, expected[None, None])


def test_every_fourth_layer_has_no_positions() -> None:
    """Layers 4, 8, ... of SmolLM3 are NoPE; with nope_every 0 none is."""
    settings = SETTINGS.model_copy(update={"layers": 36})
    without = [layer for layer, kind in enumerate(settings.kinds, 1) if kind == "nope"]
    assert without == [4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert set(settings.model_copy(update={"nope_every": 0}).kinds) == {"global"}
    with torch.device("meta"):
        blocks = Decoder(settings).blocks.values()
    assert [number + 1 for number, block in enumerate(blocks) if block.attention.kind == "nope"] == without


def test_attention_without_positions_ignores_order() -> None:
    """The last token of a NoPE layer attends to a set: the order of the others does not matter. With RoPE it does."""
    x = torch.randn(1, 8, SETTINGS.width, generator=torch.Generator().manual_seed(2))
    shuffled = torch.cat((x[:, [3, 1, 6, 0, 2, 5, 4]], x[:, 7:]), dim=1)
    for rotary in (False, True):
        torch.manual_seed(0)
        layer = Attention(SETTINGS, "global" if rotary else "nope")
        with torch.no_grad():
            same = torch.allclose(layer(x, plain(8))[:, -1], layer(shuffled, plain(8))[:, -1], atol=1e-6)
        assert same is not rotary


def test_rotation_is_that_of_complex_numbers() -> None:
    """RoPE multiplies pairs of channels, as complex numbers, by exp(i position theta^(-2k/d))."""
    x = torch.randn(2, 3, 10, SETTINGS.head_channels, dtype=torch.float64)
    first, second = x.chunk(2, dim=-1)
    k = torch.arange(SETTINGS.head_channels // 2, dtype=torch.float64)
    angle = torch.arange(10, dtype=torch.float64)[:, None] * 50_000.0 ** (-2 * k / SETTINGS.head_channels)
    expected = torch.complex(first, second) * torch.exp(1j * angle)
    rotated = rotate(x.transpose(1, 2), rotation_factors(rotary_angles(torch.arange(10), SETTINGS))).transpose(1, 2)
    torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1), rtol=1e-5, atol=1e-5)


def test_attention_groups_its_queries() -> None:
    """Query heads share key and value heads in order: heads 0 and 1 the first, heads 2 and 3 the second."""
    torch.manual_seed(0)
    layer, x = Attention(SETTINGS, "nope"), torch.randn(1, 6, SETTINGS.width)
    q, k, v = (
        p(x).view(1, 6, -1, SETTINGS.head_channels).transpose(1, 2) for p in (layer.query, layer.key, layer.value)
    )
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = (q @ k.mT / math.sqrt(SETTINGS.head_channels)).masked_fill(~torch.ones(6, 6).tril().bool(), -math.inf)
    expected = layer.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, plain(6)), expected)


def test_embeddings_are_tied() -> None:
    """The output projection is the embedding: one parameter, with gradients from both uses."""
    model = decoder()
    assert [name for name, value in model.named_parameters() if SETTINGS.vocab in value.shape] == ["embedding.weight"]
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens, tokens, torch.ones_like(tokens)).sum().backward()
    rows = model.embedding.weight.grad.abs().sum(dim=1)
    assert (rows > 0).all()


def test_smollm3_has_its_size() -> None:
    """The 3B preset has 3.075 billion parameters, and a token costs 22.07 GFLOP with attention counted."""
    config = load("smollm3-3b", ["data.shards=/data"], {})
    count = count_parameters(config.model)
    assert count == 3_075_098_624
    assert flops_per_token(config.model, config.data.sequence) / 1e9 == pytest.approx(22.07, abs=0.01)
    assert 6 * count / 1e9 == pytest.approx(18.45, abs=0.01)


def test_residual_writers_begin_smaller() -> None:
    """Matrices that write into the residual stream are scaled down with depth, the others are not."""
    names = [name for name, value in decoder().named_parameters() if value.dim() > 1]
    scaled = {name for name in names if init_std(name, SETTINGS) < SETTINGS.init_std}
    assert scaled == {name for name in names if name.endswith(("attention.output.weight", "ffn.down.weight"))}
    assert init_std("blocks.0.ffn.down.weight", SETTINGS) == pytest.approx(0.02 / math.sqrt(8))


def gpt2_positions(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of one document [length] with learnt positions, written out."""
    x = model.embedding.weight[tokens] + model.positions.weight[: len(tokens)]
    for block in model.blocks.values():
        y = block.attention_norm(x)
        mixer = block.attention
        q, k, v = (part(y).view(len(y), -1, mixer.head_dim) for part in (mixer.query, mixer.key, mixer.value))
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q, k) / math.sqrt(mixer.head_dim)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, -math.inf).softmax(-1)
        x = x + mixer.output(torch.einsum("hqk,khc->qhc", seen, v).flatten(1))
        x = x + block.ffn(block.ffn_norm(x))
    return model.norm(x) @ model.embedding.weight.mT


def test_learnt_positions() -> None:
    """They count from the start of each document, and those of a whole sequence without a mask between documents."""
    changes = {"positions": 16, "pattern": ("nope",)}
    model, tokens = decoder(**changes), tokens_of(1, 16)
    documents = (torch.arange(16) >= 7).int()[None]
    with torch.no_grad():
        packed, open_ = model(tokens, documents)[0], decoder(**changes, document_mask=False)(tokens, documents)[0]
        for part in (slice(0, 7), slice(7, 16)):
            torch.testing.assert_close(packed[part], gpt2_positions(model, tokens[0, part]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(open_, gpt2_positions(model, tokens[0]), rtol=1e-5, atol=1e-5)
    assert count_parameters(model.settings) == parameters(model.settings)
