"""Multi-head latent attention: its size and cost, what fits together, and DeepSeek's files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.trainer.attention import attention_inputs
from opsd.trainer.config import ConfigError, load
from opsd.trainer.counts import flops_per_token, parameters
from opsd.trainer.experts import within_groups
from opsd.trainer.hf.config import settings_of
from opsd.trainer.latent_attention import LatentAttention, halves
from opsd.trainer.model import Decoder, count_parameters
from opsd.trainer.model_problems import model_problem
from opsd.trainer.model_settings import LayerKind, ModelSettings

torch.set_num_threads(1)

SHAPE = ModelSettings(
    layers=2, width=32, heads=4, kv_heads=4, ffn=24, vocab=50, head_dim=10, kv_rank=11, rope_dim=4, value_dim=6
)
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
"""The config.json of deepseek-ai/DeepSeek-V2-Lite."""


def test_deepseek_v2_lite_as_published() -> None:
    """15.7 billion parameters, of which a token meets 2.4 to 2.7 (with both embeddings), as its authors say."""
    shape = settings_of(V2_LITE)
    count = parameters(shape)
    assert count == pytest.approx(15.7e9, rel=0.005)
    assert count - shape.idle_parameters == pytest.approx(2.66e9, rel=0.01)
    assert model_problem(shape) is None
    assert shape.score_scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-3)
    assert shape.yarn_attention == 1.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob = True"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
        (
            {"model_type": "deepseek_v3", "rope_interleave": False, "scoring_func": "sigmoid", "topk_method": None},
            "rope_interleave = False",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mscale_all_dim": 1.0}}, "mscale_all_dim = 1.0"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], text: str) -> None:
    """By the name of the field."""
    with pytest.raises(ConfigError, match=text):
        settings_of(V2_LITE | changes)


@pytest.mark.parametrize("changes", [{}, {"query_rank": 9}, {"query_rank": 9, "qkv_bias": True, "output_bias": True}])
def test_every_parameter_counts_and_learns(changes: dict[str, Any]) -> None:
    """The prediction of preflight is the number of parameters, all of which have gradients."""
    shape = SHAPE.model_copy(update=changes)
    assert parameters(shape) == count_parameters(shape)
    model = Decoder(shape)
    tokens = torch.randint(0, 50, (2, 12))
    model(tokens, torch.zeros(2, 12, dtype=torch.int32), tokens).sum().backward()
    assert all(value.grad is not None for value in model.parameters())


def test_scores_and_values_cost_their_channels() -> None:
    """FLOP of attention count the channels of queries and values by themselves."""
    config = load("tiny-mla", ["data.shards=/data"], {})
    count = count_parameters(config.model)
    expected = 6 * count + 6 * 4 * 4 * (48 + 32) * 256
    assert flops_per_token(config.model, 256) == expected


def test_positions_are_relative_in_the_shared_channels() -> None:
    """A document gives the same logits later in a sequence, and another order of its tokens gives others."""
    torch.manual_seed(0)
    model = Decoder(SHAPE.model_copy(update={"nope_every": 0, "query_rank": 9}))
    tokens, documents = torch.randint(0, 50, (1, 16)), torch.tensor([[0] * 8 + [1] * 8])
    tokens[:, 8:] = tokens[:, :8]
    with torch.no_grad():
        logits = model(tokens, documents)
        swapped = model(tokens[:, [1, 0, *range(2, 16)]], documents)
    torch.testing.assert_close(logits[:, 8:], logits[:, :8])
    assert (swapped[0, 7] - logits[0, 7]).abs().max() > 1e-3


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 24), rank=st.integers(1, 20), value=st.integers(1, 10), rope=st.sampled_from([2, 6]),
    kind=st.sampled_from(["global", "window", "chunk", "dual_chunk", "nope"]), softcap=st.sampled_from([0.0, 0.8]),
    cut=st.integers(0, 24),
)  # fmt: skip
def test_absorbed_matrices_change_nothing(
    tokens: int, rank: int, value: int, rope: int, kind: LayerKind, softcap: float, cut: int
) -> None:
    """Attention with latents as keys and values is that with those of each head, whatever a token sees."""
    shape = SHAPE.model_copy(update={
        "kv_rank": rank, "value_dim": value, "rope_dim": rope, "pattern": (kind,), "window": 5, "chunk": 4,
        "dual_chunk": 6, "dual_chunk_local": 2, "attention_softcap": softcap,
    })  # fmt: skip
    torch.manual_seed(tokens)
    layer = LatentAttention(shape, kind)
    inputs = attention_inputs((torch.arange(tokens) >= cut).int()[None].expand(2, -1), shape)
    parts = [torch.randn(2, tokens, *channels) for channels in ((4, 10 - rope), (4, rope), (rank,), (rope,))]
    with torch.no_grad():
        one, other = layer.expanded(*parts, inputs), layer.absorbed(*parts, inputs)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_few_tokens_after_many_are_computed_with_latents() -> None:
    """In the shape of DeepSeek-V2-Lite a token costs fewer products so, and a whole text fewer with heads' own keys."""
    layer = LatentAttention(settings_of(V2_LITE).model_copy(update={"width": 8}), "global")
    assert layer.absorbing_pays(1, 2)
    assert layer.absorbing_pays(160, 4096)
    assert not layer.absorbing_pays(180, 4096)
    assert not layer.absorbing_pays(4096, 4096)


def test_neighbouring_channels_become_pairs() -> None:
    """Channels 2i and 2i + 1 are rotated together: ``rotate`` takes i and i + n / 2."""
    assert halves(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]


@given(
    scores=st.lists(st.integers(-50, 50), min_size=6, max_size=6, unique=True), sigmoid=st.booleans(),
    chosen=st.integers(1, 3),
)  # fmt: skip
def test_experts_are_those_of_the_best_groups(scores: list[int], sigmoid: bool, chosen: int) -> None:
    """A group is as good as its best expert, or its two best together."""
    shape = SHAPE.model_copy(update={
        "experts": 6, "router_groups": 3, "groups_per_token": chosen, "router": "sigmoid" if sigmoid else "softmax",
    })  # fmt: skip
    groups = [scores[at : at + 2] for at in (0, 2, 4)]
    worth = [sum(group) if sigmoid else max(group) for group in groups]
    limit = sorted(worth)[-chosen]
    found = within_groups(torch.tensor([scores], dtype=torch.float32), shape)[0].isfinite().view(3, 2)
    assert int(found.sum()) == 2 * chosen
    assert all(value >= limit for value, kept in zip(worth, found.all(1), strict=True) if kept)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.kv_rank=0"], "model.query_rank needs model.kv_rank"),
        (["model.rope_dim=48"], "model.rope_dim above 0 and below model.head_dim 48"),
        (["model.rope_dim=15"], "model.rope_dim 15 is not even"),
        (["model.kv_heads=2"], "as many model.kv_heads as model.heads 4"),
        (["model.value_dim=64"], "model.value_dim 64 is more than model.head_dim 48"),
        (["model.qk_norm=true"], "model.qk_norm does not work with model.kv_rank"),
        (["model.experts=8", "model.experts_per_token=2", "model.router_groups=3"], "does not divide model.experts 8"),
        (["model.experts=8", "model.experts_per_token=2", "model.groups_per_token=2"], "more than model.router_groups"),
        (["model.experts=8", "model.experts_per_token=3", "model.router_groups=4"], "fewer experts"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], text: str) -> None:
    """In one sentence that names the setting."""
    with pytest.raises(ConfigError, match=text):
        load("tiny-mla", ["data.shards=/data", *overrides], {})
