"""Attention: who sees whom, the kernels against each other, and how sequences are split over ranks."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

from opsd.trainer.attention import (
    Mask,
    Packed,
    attend,
    attention_inputs,
    gathered_positions,
    kernel_for,
    pack,
    positions,
)
from opsd.trainer.documents import chunks, visible
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.rotary import rotary_angles

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
