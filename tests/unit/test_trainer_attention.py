"""Attention in its kinds: who sees whom, the kernels against each other, and how sequences are split."""

from __future__ import annotations

import cmath
import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

from opsd.trainer.attention import (
    ROWS,
    Block,
    Cache,
    LatentAttention,
    Mask,
    Packed,
    attend,
    attention_inputs,
    chunks,
    dual_chunks,
    gathered_positions,
    halves,
    kernel_for,
    pack,
    positions,
    rotary_angles,
    visible,
    within_documents,
)
from opsd.trainer.config import ConfigError, load
from opsd.trainer.counts import flops_per_token, parameters
from opsd.trainer.experts import within_groups
from opsd.trainer.hf.config import settings_of
from opsd.trainer.model import Decoder, count_parameters
from opsd.trainer.model_settings import LayerKind, ModelSettings, model_problem

# Attention: who sees whom, the kernels against each other, and how sequences are split over ranks.


torch.set_num_threads(1)

SETTINGS = ModelSettings(layers=2, width=64, heads=4, kv_heads=2, ffn=48, vocab=64)

DOCUMENTS = st.lists(st.integers(0, 2), min_size=1, max_size=24).map(
    lambda steps: torch.tensor([steps]).clamp(max=1).cumsum(1).int()
)


class Ranks:
    """Stands for the mesh of so many ranks, of which one looks."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def get_local_rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def mask_of(documents: torch.Tensor, kernel: str, window: int = 0) -> Mask:
    changed = SETTINGS.model_copy(update={"attention": kernel, "window": window})
    return attention_inputs(documents, changed).masks[changed.kinds[0]]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@settings(max_examples=30, deadline=None)
@given(documents=DOCUMENTS, window=st.integers(0, 6))
def test_a_token_sees_the_near_past_of_its_document(documents: torch.Tensor, window: int) -> None:
    """The mask is the definition, written out."""
    length = documents.shape[1]
    mask = visible(documents, torch.arange(length), torch.arange(length), window)[0, 0]
    for query in range(length):
        for key in range(length):
            window_mask = 0 <= query - key < (window or length)
            assert mask[query, key] == (window_mask and documents[0, query] == documents[0, key])


@settings(max_examples=30, deadline=None)
@given(documents=DOCUMENTS, length=st.integers(1, 6))
def test_chunks_count_from_the_start_of_a_document(documents: torch.Tensor, length: int) -> None:
    """A document is divided alike wherever in a sequence it is: as transformers divides it by itself."""
    masking_utils = pytest.importorskip("transformers.masking_utils")
    rule = masking_utils.chunked_causal_mask_function(length, torch.zeros(1, dtype=torch.int64))
    size = documents.shape[1]
    at = torch.arange(size)
    alone = rule(0, 0, at[:, None], at[None, :])
    mask = visible(chunks(documents, length), torch.arange(size), torch.arange(size))[0, 0]
    ids = documents[0].tolist()
    for query in range(size):
        for key in range(size):
            begin = ids.index(ids[query])
            inside = ids[key] == ids[query] and alone[query - begin, key - begin]
            assert mask[query, key] == inside


def test_kernels_agree_on_chunks() -> None:
    """FlexAttention's blocks and packed starts are of the same chunks as the mask."""
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 16]).int()
    chunked = SETTINGS.model_copy(update={"pattern": ("chunk",), "chunk": 4, "attention": "flex"})
    flex = attention_inputs(documents, chunked).masks["chunk"]
    sdpa = attention_inputs(documents, chunked.model_copy(update={"attention": "sdpa"})).masks["chunk"]
    q, k, v = drawn(2, 4, 16, 16), drawn(2, 2, 16, 16), drawn(2, 2, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(attend(q, k, v, flex, None, 0.3), attend(q, k, v, sdpa, None, 0.3))
    packed = attention_inputs(documents, chunked.model_copy(update={"attention": "varlen"})).masks["chunk"]
    assert isinstance(packed, Packed)
    assert packed.starts.unique().tolist() == [0, 4, 5, 9, 13, 16, 20, 24, 28, 32]


@pytest.mark.parametrize(("softcap", "values"), [(0.0, 16), (1.5, 16), (0.0, 12)])
@pytest.mark.parametrize("window", [0, 3])
def test_flex_attention_is_attention(window: int, softcap: float, values: int) -> None:
    """The kernel for GPUs, run here without compiling, gives what the mask gives."""
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 16]).int()
    q, k, v = drawn(2, 4, 16, 16), drawn(2, 2, 16, 16), drawn(2, 2, 16, values)
    flex, sdpa = (mask_of(documents, kernel, window) for kernel in ("flex", "sdpa"))
    assert isinstance(flex, BlockMask)
    with torch.no_grad():
        one, other = (attend(q, k, v, mask, None, 0.3, softcap) for mask in (flex, sdpa))
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("device", "capability", "ranks", "dtype", "kernel"),
    [
        ("cpu", (0, 0), 1, "bfloat16", "sdpa"), ("cuda", (8, 0), 1, "bfloat16", "varlen"),
        ("cuda", (9, 0), 1, "float32", "sdpa"), ("cuda", (8, 0), 2, "bfloat16", "flex"),
        ("cuda", (7, 5), 1, "bfloat16", "sdpa"), ("cuda", (7, 0), 2, "bfloat16", "sdpa"),
        ("cuda", (7, 5), 2, "float32", "sdpa"),
    ],
)  # fmt: skip
def test_the_kernel_runs_on_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], ranks: int, dtype: str, kernel: str
) -> None:
    """FlashAttention has no float32, which is the default type, and no GPU before A100; a wish is granted."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    wanted, context = SETTINGS.model_copy(update={"dtype": dtype}), None if ranks == 1 else cast(Any, Ranks(0, ranks))
    assert kernel_for(wanted, torch.device(device), context) == kernel
    assert kernel_for(wanted.model_copy(update={"attention": "flex"}), torch.device(device), None) == "flex"


@settings(max_examples=30, deadline=None)
@given(documents=DOCUMENTS, rows=st.integers(1, 3))
def test_packed_documents_begin_where_they_begin(documents: torch.Tensor, rows: int) -> None:
    """The starts are those of all documents of all rows, padded to one of few sizes with the end."""
    documents = documents.expand(rows, -1)
    length = documents.shape[1]
    packed = pack(documents, window=4)
    begin = [
        r * length + i for r in range(rows) for i in range(length) if not i or documents[r, i - 1] != documents[r, i]
    ]
    assert packed.starts.tolist() == begin + [rows * length] * (len(packed.starts) - len(begin))
    assert packed.starts.dtype == torch.int32
    assert (len(packed.starts) - 1).bit_count() == 1
    assert len(packed.starts) > len(begin)
    assert (packed.longest, packed.window) == (length, 4)


def test_the_kernel_follows_the_setting() -> None:
    """Plain causal attention needs no mask; with documents each kernel has its own form of one."""
    documents = torch.zeros(1, 8, dtype=torch.int32)
    assert mask_of(documents, "sdpa").dtype == torch.bool
    assert isinstance(mask_of(documents, "varlen"), Packed)
    assert mask_of(documents, "auto").dtype == torch.bool
    plain = SETTINGS.model_copy(update={"document_mask": False, "window": 2, "pattern": ("nope", "window")})
    masks = attention_inputs(documents, plain).masks
    assert masks["nope"] is None
    assert masks["window"].sum() == 15


@given(ranks=st.integers(1, 8), parts=st.integers(1, 5))
def test_ranks_share_a_sequence_evenly(ranks: int, parts: int) -> None:
    """Each position is on one rank, and every rank has as many keys to look at."""
    length, device = 2 * ranks * parts, torch.device("cpu")
    mine = [positions(length, Ranks(rank, ranks), device) for rank in range(ranks)]
    assert torch.equal(torch.cat(mine), gathered_positions(length, Ranks(0, ranks), device))
    assert sorted(torch.cat(mine).tolist()) == list(range(length))
    assert len({int((at + 1).sum()) for at in mine}) == 1
    assert all(torch.equal(at, at.sort().values) for at in mine)


def test_yarn_leaves_fast_channels_and_slows_the_others() -> None:
    """The fastest channel keeps its frequency, the slowest is stretched by the factor, all are scaled (YaRN, 3.4)."""
    shape = ModelSettings(layers=1, width=128, heads=1, kv_heads=1, ffn=8, vocab=8, rope_theta=1e4)
    yarn = shape.model_copy(update={"yarn_factor": 4.0, "yarn_positions": 4096})
    one = torch.tensor([1])
    plain, stretched = rotary_angles(one, shape), rotary_angles(one, yarn)
    scale = stretched.square().sum(0).sqrt()
    torch.testing.assert_close(scale, torch.full_like(scale, 1.138629))  # 0.1 ln 4 + 1
    angle, yarn_angle = (torch.atan2(x[1], x[0])[0] for x in (plain, stretched))
    torch.testing.assert_close(yarn_angle[0], angle[0])
    torch.testing.assert_close(yarn_angle[-1], angle[-1] / 4)
    assert ((yarn_angle <= angle * 1.0001) & (yarn_angle >= angle / 4.0001)).all()


# Dual-chunk attention against its definition, written out pair by pair, and against plain attention.


torch.set_num_threads(1)

SHAPE = ModelSettings(
    layers=2, width=24, heads=4, kv_heads=2, head_dim=6, ffn=16, vocab=40, pattern=("dual_chunk",), dual_chunk=7,
    dual_chunk_local=3, rope_theta=100.0,
)  # fmt: skip

DRAWN_DOCUMENTS = st.builds(
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
    documents=DRAWN_DOCUMENTS, size=st.integers(1, 6), local=st.integers(0, 6), positions=st.sampled_from([0, 3]),
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


# Multi-head latent attention: its size and cost, what fits together, and DeepSeek's files.


torch.set_num_threads(1)

LATENT = ModelSettings(
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
    shape = LATENT.model_copy(update=changes)
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
    model = Decoder(LATENT.model_copy(update={"nope_every": 0, "query_rank": 9}))
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
    shape = LATENT.model_copy(update={
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
    shape = LATENT.model_copy(update={
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
def test_what_does_not_fit_is_refused_of_trainer_latent(overrides: list[str], text: str) -> None:
    """In one sentence that names the setting."""
    with pytest.raises(ConfigError, match=text):
        load("tiny-mla", ["data.shards=/data", *overrides], {})


# Reading on from a cache: the logits of tokens are those that they have when all are read at once.


torch.set_num_threads(1)

CACHED = ModelSettings(layers=3, width=24, heads=4, kv_heads=2, ffn=16, vocab=40)

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
    model, tokens = Decoder(CACHED.model_copy(update=VARIANTS[variant])), torch.randint(0, 40, (2, 20))
    documents, cache = (torch.arange(20) >= begin).int()[None].expand(2, -1), Cache()
    parts = []
    with torch.no_grad():
        whole = model(tokens, documents)
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 20], strict=True):
            model(tokens[:, start:], documents, cache=cache.branch())
            parts.append(model(tokens[:, start:end], documents[:, :end], cache=cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
