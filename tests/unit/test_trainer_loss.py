"""The loss in parts: against the loss of all logits at once, written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from opsd.trainer.loss import LossTerms, linear_loss, part_loss
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings

torch.set_num_threads(1)


def drawn(tokens: int = 13, vocab: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + vocab)
    x, weight = torch.randn(tokens, 6, generator=generator), torch.randn(vocab, 6, generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocab, (tokens,), generator=generator)


def plain(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, terms: LossTerms) -> torch.Tensor:
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
        linear_loss(x, weight, targets, terms, part_bytes=4 * vocab * at_once), plain(x, weight, targets, terms),
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
    theirs = torch.autograd.grad(plain(*halves, targets, LossTerms()).sum(), halves)
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
