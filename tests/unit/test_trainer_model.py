"""The model: positions, sizes, its loss, and layers with a state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from opsd.trainer.attention import AttentionInputs, attention_inputs, rotary_angles, rotate, rotation_factors, visible
from opsd.trainer.config import ConfigError, load
from opsd.trainer.counts import flops_per_token, parameters
from opsd.trainer.loss import LossTerms, linear_loss, part_loss
from opsd.trainer.model import Attention, Block, Decoder, count_parameters, init_std
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.recurrent import CHUNK, Decays, gated_delta_rule, state_space
from opsd.trainer.regions import initialise

# The model: who sees whom, where positions are, what is shared, and how large it is.


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


# The loss in parts: against the loss of all logits at once, written out.


torch.set_num_threads(1)


def drawn(tokens: int = 13, vocab: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + vocab)
    x, weight = torch.randn(tokens, 6, generator=generator), torch.randn(vocab, 6, generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocab, (tokens,), generator=generator)


def plain_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    """The definition, with all logits in float32."""
    logits = (x @ weight.mT).float()
    if terms.softcap:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    z = terms.z_loss * torch.logsumexp(logits, -1).square().mean()
    return torch.stack((F.cross_entropy(logits, targets), z))


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 17), vocab=st.integers(1, 12), at_once=st.integers(1, 20),
    z_loss=st.sampled_from([0.0, 0.3]), softcap=st.sampled_from([0.0, 1.5]), scale=st.sampled_from([1.0, 0.25]),
)  # fmt: skip
def test_in_parts_it_is_the_same(
    tokens: int, vocab: int, at_once: int, z_loss: float, softcap: float, scale: float
) -> None:
    """Both terms and the gradients of their sum are those of the definition, however the tokens are cut."""
    terms, found = LossTerms(z_loss, softcap), []
    x, weight, targets = drawn(tokens, vocab)
    for loss in (
        linear_loss(x, weight, targets, terms, part_bytes=4 * vocab * at_once), plain_loss(x, weight, targets, terms),
    ):  # fmt: skip
        found.append((loss.detach(), *torch.autograd.grad(scale * loss.sum(), [x, weight])))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_equal_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    """And a shift of all logits, free otherwise, costs with the z-loss."""
    logits, targets = torch.zeros(4, 11), torch.tensor([0, 3, 10, 5])
    (loss, z), _ = part_loss(logits.clone(), targets, LossTerms(0.5), 1.0)
    assert loss.item() == pytest.approx(4 * math.log(11))
    (shifted, shifted_z), _ = part_loss(logits + 7, targets, LossTerms(0.5), 1.0)
    torch.testing.assert_close(shifted, loss)
    assert shifted_z > z == pytest.approx(0.5 * 4 * math.log(11) ** 2)


def test_half_precision_is_summed_in_float32() -> None:
    """Loss and gradient of the weights are sums in float32, rounded once."""
    x, weight, targets = drawn(64, 11)
    halves = [value.detach().bfloat16().requires_grad_() for value in (x, weight)]
    loss = linear_loss(*halves, targets, LossTerms(), part_bytes=44)
    assert loss.dtype == torch.float32
    logits = (halves[0] @ halves[1].mT).float()
    torch.testing.assert_close(loss[0], F.cross_entropy(logits, targets))
    ours = torch.autograd.grad(loss.sum(), halves)
    theirs = torch.autograd.grad(plain_loss(*halves, targets, LossTerms()).sum(), halves)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=5e-2, atol=2e-3)


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_there_are_never_all_logits() -> None:
    """No operation of a training step of the model returns a tensor of all tokens by the vocabulary."""
    shape = ModelSettings(layers=1, width=8, heads=2, kv_heads=1, ffn=8, vocab=5000)
    model, tokens = Decoder(shape), torch.randint(0, 5000, (2, 64))
    x, weight, targets = torch.randn(128, 8, requires_grad=True), model.head.weight, tokens.flatten()
    with _Largest() as whole:
        linear_loss(x, weight, targets, LossTerms()).sum().backward()
    with _Largest() as parts:
        linear_loss(x, weight, targets, LossTerms(), part_bytes=4 * 5000 * 4).sum().backward()
    assert whole.elements == 128 * 5000
    assert parts.elements == 5000 * 8


def test_without_gradients_none_are_computed() -> None:
    """The loss under no_grad is the same number."""
    x, weight, targets = drawn()
    with torch.no_grad():
        loss = linear_loss(x, weight, targets, LossTerms(0.1))
    assert not loss.requires_grad
    assert torch.equal(loss, linear_loss(x, weight, targets, LossTerms(0.1)).detach())


# Layers with a state: token by token, as transformers' layers, within documents, and what fits together.


torch.set_num_threads(1)

SHAPE = ModelSettings(
    layers=3, width=32, heads=4, kv_heads=2, ffn=24, vocab=50, pattern=("mamba", "delta", "global"), state_heads=4,
    state_key_heads=2, state_key_dim=6, state_value_dim=10, state_conv_bias=True,
)  # fmt: skip


def token_by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, shares: torch.Tensor | None,
    documents: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The definition of both kinds: without ``shares`` Mamba-2, with them the gated delta rule."""
    state, outputs = torch.zeros(*v.shape[:1], *v.shape[2:3], k.shape[-1], v.shape[-1]), []
    for token in range(v.shape[1]):
        if token:
            state = state * (documents[:, token] == documents[:, token - 1])[:, None, None, None]
        state = state * decay[:, token, :, None, None].exp()
        new = v[:, token]
        if shares is not None:
            new = shares[:, token, :, None] * (new - (k[:, token, :, None] @ state)[:, :, 0])
        state = state + k[:, token, :, :, None] * new[:, :, None]
        outputs.append((q[:, token, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 3 * CHUNK + 5])
def test_chunks_compute_what_tokens_define(delta: bool, length: int) -> None:
    """Chunk by chunk, states, results and gradients are those of one token after the other."""
    torch.manual_seed(length)
    q, k = (torch.randn(2, length, 3, 6) for _ in range(2))
    k = nn.functional.normalize(k, dim=-1).requires_grad_()
    v, steps = torch.randn(2, length, 3, 5), -torch.rand(2, length, 3).requires_grad_()
    shares = torch.rand(2, length, 3) if delta else None
    documents = (torch.rand(2, length) < 0.03).cumsum(1)
    expected = token_by_token(q, k, v, steps, shares, documents)
    decays = Decays.of(steps, documents)
    found = state_space(q, k, v, decays) if shares is None else gated_delta_rule(q, k, v, shares, decays)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    into = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * into).sum(), (k, steps)),
        torch.autograd.grad((expected * into).sum(), (k, steps)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def drawn_states(settings: ModelSettings) -> Decoder:
    model = Decoder(settings)
    initialise(model, 1)
    return model


def test_layers_are_those_of_transformers() -> None:
    """With the same weights the layers give what Mamba2Mixer and Qwen3NextGatedDeltaNet give, over several chunks."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    from opsd.trainer.hf.architectures import DELTA, MAMBA

    settings = SHAPE.model_copy(update={"state_value_dim": 16, "state_key_dim": 12, "norm_eps": 1e-5})
    mamba = Mamba2Mixer(
        transformers.Mamba2Config(
            num_heads=4, head_dim=16, hidden_size=32, state_size=12, n_groups=2, chunk_size=16, num_hidden_layers=1,
        ), 0,
    )  # fmt: skip
    delta = Qwen3NextGatedDeltaNet(
        transformers.Qwen3NextConfig(
            hidden_size=32, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=12,
            linear_value_head_dim=16, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-5,
        ), 0,
    )  # fmt: skip
    x, documents = torch.randn(2, 2 * CHUNK + 9, 32), torch.zeros(2, 2 * CHUNK + 9, dtype=torch.int32)
    for theirs, fields, bias in ((mamba, MAMBA, True), (delta, DELTA, False)):
        model = Block(settings.model_copy(update={"pattern": (fields.kind,), "state_conv_bias": bias}), 0, None)  # type: ignore[arg-type]
        ours = model.attention
        stored = dict(theirs.named_parameters())
        with torch.no_grad():
            for name, value in ours.named_parameters():
                nn.init.normal_(value, std=0.3)
                place = fields.place(name, settings)
                there = stored[place.name.removeprefix(f"{fields.block}.")]
                rows = there if place.whole else place.rows(there)
                rows.copy_(value.view_as(rows))
            expected = theirs(x)
            found = ours(x, attention_inputs(documents, settings))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_documents_are_apart(lengths: list[int]) -> None:
    """In a sequence of several documents each has the logits that it has alone: states and convolutions begin anew."""
    model = drawn_states(SHAPE)
    tokens = torch.randint(0, 50, (1, sum(lengths)))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    with torch.no_grad():
        together = model(tokens, documents).split(lengths, dim=1)
        alone = [model(part, torch.zeros_like(part)) for part in tokens.split(lengths, dim=1)]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_without_a_document_mask_states_go_on() -> None:
    """What comes before the document matters then."""
    tokens, documents = torch.randint(0, 50, (1, 20)), torch.tensor([[0] * 10 + [1] * 10])
    model = drawn_states(SHAPE.model_copy(update={"document_mask": False}))
    with torch.no_grad():
        together, whole = model(tokens, documents), model(tokens, torch.zeros_like(documents))
    assert torch.equal(together, whole)


@pytest.mark.parametrize(
    "changes", [{}, {"state_key_heads": 0}, {"state_conv_bias": False, "attention_gate": True, "qkv_bias": True}]
)
def test_every_parameter_counts_and_learns(changes: dict[str, Any]) -> None:
    """The prediction of preflight is the number of parameters, all of which have gradients."""
    shape = SHAPE.model_copy(update=changes)
    assert parameters(shape) == count_parameters(shape)
    model = drawn_states(shape)
    tokens = torch.randint(0, 50, (2, 12))
    model(tokens, torch.zeros(2, 12, dtype=torch.int32), tokens).sum().backward()
    assert all(value.grad is not None and value.grad.any() for value in model.parameters())


def test_a_gate_of_shared_experts_counts() -> None:
    """Of the experts that compute every token."""
    experts = {"experts": 4, "experts_per_token": 2, "shared_experts": 1, "shared_gate": True}
    shape = SHAPE.model_copy(update=experts)
    assert parameters(shape) == count_parameters(shape)
    assert parameters(shape) - parameters(shape.model_copy(update={"shared_gate": False})) == 3 * 32


def test_states_cost_no_more_in_longer_sequences() -> None:
    """FLOP grow with the sequence in the layer of attention only; a state is 4 heads of 32 x 32 in three layers."""
    config = load("tiny-hybrid", ["data.shards=/data"], {})
    states = 6 * (2 + 3 + 3) * 4 * 32 * 32
    for length in (256, 4096):
        expected = 6 * count_parameters(config.model) + states + 12 * 128 * length
        assert flops_per_token(config.model, length) == expected


def test_rates_and_steps_are_drawn() -> None:
    """Rates of decay are between 1 and 16, steps between 0.001 and 0.1."""
    model = drawn_states(SHAPE.model_copy(update={"state_heads": 64}))
    for name, value in model.named_parameters():
        if name.endswith("log_rate"):
            assert 1 <= value.exp().min() < 4 < 12 < value.exp().max() <= 16
        elif name.endswith("step_bias"):
            steps = nn.functional.softplus(value)
            assert 0.00099 < steps.min() < 0.003 < 0.03 < steps.max() < 0.101


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.state_heads=0"], "model.pattern has 'mamba', which needs model.state_heads"),
        (["model.state_key_dim=0"], "which needs model.state_key_dim"),
        (["model.state_key_heads=3"], "model.state_heads 4 is not a multiple of model.state_key_heads 3"),
        (["parallel.cp=2"], "parallel.cp does not work with layers of model.pattern that have a state"),
        (["parallel.tp=4"], "parallel.tp 4 does not divide model.kv_heads 2"),
        (["parallel.tp=4", "model.kv_heads=4"], "parallel.tp 4 does not divide model.state_key_heads 2"),
        (["model.rope_dim=34"], "model.rope_dim 34 is more than model.head_dim 32"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], text: str) -> None:
    """In one sentence that names the setting."""
    with pytest.raises(ConfigError, match=text):
        load("tiny-hybrid", ["data.shards=/data", *overrides], {})
