"""The FLOP of a plan: the trainer's own count, and what torch counts of a step."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from opsd.commands.main import cli
from opsd.plan.memory import state_products
from opsd.trainer import counts
from opsd.trainer.config import PRESETS, load
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import STATE_PRODUCTS, ModelSettings

LENGTH = 256


def counted(model: ModelSettings) -> dict[str, float]:
    """FLOP per token of a sequence, forward and backward, by torch's operation; fused attention is none of them."""
    torch.set_num_threads(1)
    decoder = Decoder(model)
    decoder.routing.begin(1, torch.device("cpu"))
    tokens = torch.randint(0, model.vocab, (1, LENGTH))
    with FlopCounterMode(display=False) as counter:
        decoder(tokens, torch.zeros(1, LENGTH, dtype=torch.int32), tokens).sum().backward()
    return {str(name): flops / LENGTH for name, flops in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_a_plan_has_the_trainers_count(preset: str) -> None:
    """Which is the numerator of MFU, for every preset."""
    result = CliRunner().invoke(cli, ["plan", preset, "--gpus", "8", "--measured", "none", "--json", "-"])
    assert result.exit_code == 0, result.output
    config = load(preset, ["data.shards=/data"], environ={})
    assert json.loads(result.stdout)["flops_per_token"] == counts.flops_per_token(config.model, config.data.sequence)


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe", "tiny-mla", "tiny-hybrid"])
def test_the_products_are_those_of_a_step(preset: str) -> None:
    """6 FLOP for each parameter that a token meets, which are nearly all in matrices: within 1 %."""
    model = load(preset, ["data.shards=/data", "model.document_mask=false"], environ={}).model
    assert counted(model)["aten.mm"] == pytest.approx(6 * counts.active_parameters(model), rel=0.01)


def test_the_products_with_states_are_those_of_a_step() -> None:
    """In chunks, forward and backward: within 10 %, because torch counts no triangular system."""
    model = load("tiny-hybrid", ["data.shards=/data", "model.document_mask=false"], environ={}).model
    products = sum(state_products(model, kind) for kind in model.kinds if kind in STATE_PRODUCTS)
    assert counted(model)["aten.bmm"] == pytest.approx(3 * products, rel=0.1)
