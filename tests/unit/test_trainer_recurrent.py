"""Layers with a state: token by token, as transformers' layers, within documents, and what fits together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from opsd.trainer.attention import attention_inputs
from opsd.trainer.config import ConfigError, load
from opsd.trainer.counts import flops_per_token, parameters
from opsd.trainer.model import Block, Decoder, count_parameters
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.recurrent import CHUNK, Decays, gated_delta_rule, state_space
from opsd.trainer.regions import initialise

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


def drawn(settings: ModelSettings) -> Decoder:
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
    model = drawn(SHAPE)
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
    model = drawn(SHAPE.model_copy(update={"document_mask": False}))
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
    model = drawn(shape)
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
    model = drawn(SHAPE.model_copy(update={"state_heads": 64}))
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
