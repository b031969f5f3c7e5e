"""AdamW on plain tensors: what decays, what is clipped, what happens to gradients that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.optimizer import Optimizer
from opsd.trainer.settings import OptimizerSettings

torch.set_num_threads(1)  # threads cost more than they bring for matrices this small

SHAPE = ModelSettings(layers=1, width=8, heads=2, kv_heads=1, ffn=16, vocab=10)


def make(**settings: float) -> tuple[Decoder, Optimizer]:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    return model, Optimizer(model, OptimizerSettings(lr=0.1, **settings))


def fill_gradients(model: Decoder, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def copy(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_embeddings_and_norms_do_not_decay() -> None:
    """With zero gradients only weight decay moves a parameter, and only the matrices of the layers move."""
    model, optimizer = make(weight_decay=0.5)
    before = copy(model)
    fill_gradients(model, 0.0)
    assert optimizer.update(0.1, math.sqrt(optimizer.take_gradients().item()))
    for name, value in model.named_parameters():
        factor = 1.0 if name.startswith("embedding") or "norm" in name else 1 - 0.1 * 0.5
        torch.testing.assert_close(value.detach(), before[name] * factor)


def test_the_norm_is_over_all_parameters() -> None:
    """The squared norm counts every element of every gradient once, and the model's gradients are gone after it."""
    model, optimizer = make()
    fill_gradients(model, 2.0)
    count = sum(p.numel() for p in model.parameters())
    assert optimizer.take_gradients().item() == pytest.approx(4.0 * count)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("gradient", "clip", "seen"), [(2.0, 1e9, 2.0), (2.0, 1.0, None)])
def test_gradients_are_clipped_to_the_limit(gradient: float, clip: float, seen: float | None) -> None:
    """The first moment shows the gradient that AdamW saw: as it was, or scaled to the norm ``clip``."""
    model, optimizer = make(clip=clip)
    fill_gradients(model, gradient)
    norm = math.sqrt(optimizer.take_gradients().item())
    optimizer.update(0.1, norm)
    expected = (1 - 0.9) * (seen or gradient * clip / norm)
    for name, _ in model.named_parameters():
        moment = optimizer.moments(name)["exp_avg"]
        torch.testing.assert_close(moment, torch.full_like(moment, expected))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing(norm: float) -> None:
    """NaN or infinity in a gradient is refused: parameters, moments and the count of updates stay as they were."""
    model, optimizer = make()
    before = copy(model)
    fill_gradients(model, math.nan)
    assert math.isnan(optimizer.take_gradients().item())
    assert not optimizer.update(0.1, norm)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])
        assert not optimizer.moments(name)["exp_avg"].any()
    assert optimizer.updates == 0


def test_it_is_adamw() -> None:
    """Three updates give what torch's own unfused AdamW gives."""
    model, optimizer = make(weight_decay=0.0, clip=1e9)
    peer = Decoder(SHAPE)
    peer.load_state_dict(model.state_dict())
    reference = torch.optim.AdamW(peer.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, fused=False)
    for step in range(3):
        for module in (model, peer):
            fill_gradients(module, 0.1 * (step + 1))
        optimizer.update(0.1, math.sqrt(optimizer.take_gradients().item()))
        reference.step()
    for one, other in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(one, other)
