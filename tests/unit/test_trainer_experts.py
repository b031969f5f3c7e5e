"""Mixture of experts: who computes a token, what the routers' losses pull at, and what is measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from opsd.trainer.config import ConfigError, load
from opsd.trainer.counts import flops_per_token, parameters
from opsd.trainer.experts import (
    LOADS,
    MixtureOfExperts,
    Routing,
    balance_loss,
    grouped_product,
    loads,
    product_by_group,
    routing_figures,
    rows,
)
from opsd.trainer.model import Decoder, count_parameters
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.settings import ParallelSettings
from opsd.trainer.world import mesh_shape

torch.set_num_threads(1)  # threads cost more than they bring for matrices this small

SHAPE = ModelSettings(layers=2, width=16, heads=2, kv_heads=1, ffn=24, vocab=50, experts=5, experts_per_token=2)
CPU = torch.device("cpu")


def layer(**changes: object) -> tuple[MixtureOfExperts, Routing]:
    """The experts of layer 1, and what measures them."""
    torch.manual_seed(0)
    shape = SHAPE.model_copy(update=changes)
    routing = Routing(shape)
    routing.begin(1, CPU)
    return MixtureOfExperts(shape, 1, routing), routing


def tokens(rows: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randn(rows, length, SHAPE.width, generator=torch.Generator().manual_seed(1), requires_grad=True)


def by_definition(model: MixtureOfExperts, x: torch.Tensor, shape: ModelSettings) -> torch.Tensor:
    """Every expert computes every token, and what the router did not choose counts 0."""
    experts, networks = model.experts, model.experts.networks
    logits = x @ experts.router.weight.mT
    gates = logits.softmax(-1) if shape.router == "softmax" else logits.sigmoid()
    kept = torch.zeros_like(gates).scatter(-1, gates.topk(shape.experts_per_token).indices, 1.0)
    weights = gates * kept
    if shape.router_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    outputs = [
        (torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT
        for gate, up, down in zip(*(part.weight for part in (networks.gate, networks.up, networks.down)), strict=True)
    ]
    y = (torch.stack(outputs, -1) * weights[..., None, :]).sum(-1) * shape.router_scale
    return y + model.shared(x) if model.shared else y


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": "sigmoid", "router_normalised": True, "router_scale": 2.5, "shared_experts": 2},
        {"expert_ffn": 10, "experts_per_token": 5},
        {"experts": 1, "experts_per_token": 1},
    ],
)
def test_a_token_is_computed_by_its_experts(changes: dict[str, object]) -> None:
    """Output and all gradients are those of the definition."""
    model, _ = layer(**changes)
    x, same = tokens(), tokens()
    y, expected = model(x), by_definition(model, same, SHAPE.model_copy(update=changes))
    torch.testing.assert_close(y, expected)
    pull = torch.randn_like(y)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(y, [x, *parameters], pull)
    theirs = torch.autograd.grad(expected, [same, *parameters], pull)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [2, 2, 3]])
def test_both_products_are_the_same(counts: list[int]) -> None:
    """The kernel for GPUs and the loop give the same numbers and gradients, with groups that are empty too."""
    found = []
    for product in (grouped_product, product_by_group):
        x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        weight = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
        y = product(x, weight, torch.tensor(counts))
        found.append((y, *torch.autograd.grad(y, [x, weight], torch.ones_like(y) + y.detach())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@settings(max_examples=50, deadline=None)
@given(
    chosen=st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=3),
    times=st.integers(1, 3),
)
def test_tokens_go_out_and_come_back(chosen: list[list[int]], times: int) -> None:
    """Loads are counts by row, and rows that were sorted by expert are put back where they were."""
    experts = torch.tensor(chosen)
    assert loads(experts, 5).tolist() == [[row.count(expert) for expert in range(5)] for row in chosen]
    order = experts.flatten().repeat_interleave(times).argsort(stable=True)
    inverse = order.argsort()
    x = torch.arange(experts.numel(), dtype=torch.float64)[:, None].requires_grad_()
    back = rows(rows(x, order, inverse, times), inverse, order)
    assert back.flatten().tolist() == x.detach().flatten().repeat_interleave(times).tolist()
    back.sum().backward()
    assert x.grad is not None
    assert (x.grad == times).all()


def test_the_balance_loss_is_one_where_loads_are_even() -> None:
    """Even loads cost 1, one expert for everything costs as much as there are experts."""
    even = torch.full((1, 4), 2)
    assert balance_loss(even, torch.full((1, 8, 4), 0.25)).item() == pytest.approx(1)
    alone = torch.tensor([[8, 0, 0, 0]])
    assert balance_loss(alone, torch.eye(4)[torch.zeros(1, 8, dtype=torch.int64)]).item() == pytest.approx(4)


def test_losses_pull_at_the_router() -> None:
    """The gradients are those of the loss with both router losses added, by a micro-batch's share of the step."""
    model, routing = layer()
    routing.balance_loss, routing.z_loss = 0.3, 0.1
    routing.begin(4, CPU)
    x = tokens()
    (model(x).square().mean() / 4).backward()
    ours = model.experts.router.weight.grad
    assert ours is not None
    same = tokens()
    logits = same @ model.experts.router.weight.mT
    shares = logits.softmax(-1)
    counts = loads(shares.topk(2).indices.flatten(1), 5)
    balance = 0.3 * 5 * (counts / 14 * shares.mean(1)).sum(-1).mean()
    z = 0.1 * logits.logsumexp(-1).square().mean()
    total = (by_definition(model, same, SHAPE).square().mean() + balance + z) / 4
    (theirs,) = torch.autograd.grad(total, model.experts.router.weight)
    torch.testing.assert_close(ours, theirs)
    figures = routing_figures(routing.of_all(routing.measured.flatten().tolist(), 1))
    assert figures["balance_loss"] == pytest.approx(balance.item() / 4)
    assert figures["router_z_loss"] == pytest.approx(z.item() / 4)


def test_recomputed_layers_count_once() -> None:
    """What is recomputed in the backward pass is measured once; what has no backward pass is not measured."""
    model, routing = layer()
    with torch.no_grad():
        model(tokens())
    assert routing.measured.sum() == 0
    y = checkpoint(model, tokens(), use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    y.sum().backward()
    assert routing.measured[1, LOADS:].sum() == 2 * 7 * 2
    assert routing.measured[0].sum() == 0


def test_biases_choose_and_do_not_weigh() -> None:
    """A bias sends tokens to an expert and leaves its weight as it is; a step moves it against the load."""
    model, routing = layer(router_bias=True)
    experts = model.experts
    assert experts.bias is not None
    before = experts.router(tokens()).softmax(-1)
    experts.bias[3] = 10.0
    chosen, weights, _ = experts._route(tokens())
    assert (chosen == 3).any(-1).all()
    torch.testing.assert_close(weights, before.gather(-1, chosen))
    model(tokens()).sum().backward()
    experts.move_bias(routing.measured[1], 0.5)
    assert experts.bias[3] == 9.5
    unloaded = routing.measured[1, LOADS:] < routing.measured[1, LOADS:].mean()
    assert (experts.bias[unloaded] == 0.5).all()


def test_a_collapsed_router_shows() -> None:
    """With every token at one expert its load is the number of experts, and the entropy of its weights is 0."""
    model, routing = layer(experts_per_token=1)
    with torch.no_grad():
        model.experts.router.weight.zero_()
        model.experts.router.weight[2] = 1e3
    model(tokens().abs() + 0.1).sum().backward()
    figures = routing_figures(routing.measured[1:])
    assert figures["router_load"] == 5
    assert figures["router_entropy"] == pytest.approx(0, abs=1e-6)
    assert routing_figures(Routing(SHAPE.model_copy(update={"experts": 0})).measured) == {}


def test_first_layers_can_be_dense() -> None:
    """Layers before the first with experts have a plain feed-forward network."""
    model = Decoder(SHAPE.model_copy(update={"layers": 3, "dense_layers": 2}))
    assert [isinstance(block.ffn, MixtureOfExperts) for block in model.blocks.values()] == [False, False, True]


def test_a_token_costs_what_it_meets() -> None:
    """FLOP count experts that a token is sent to; memory and checkpoints have all of them."""
    config = load("tiny-moe", ["data.shards=/data"], {})
    model, count = config.model, count_parameters(config.model)
    assert parameters(model) == count
    idle = 3 * (8 - 2) * 3 * 128 * 128
    attention = 12 * 4 * 128 * 256
    assert flops_per_token(model, 256) == 6 * (count - idle) + attention


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.experts_per_token=9"], "needs model.experts_per_token from 1 to 8"),
        (["model.experts_per_token=0"], "needs model.experts_per_token"),
        (["model.ffn_bias=true"], "model.ffn_bias does not work with model.experts"),
        (["model.router_bias=false"], "optimizer.balance_rate needs model.router_bias"),
        (["parallel.tp=3", "model.heads=6", "model.kv_heads=3", "model.vocab=2049", "model.width=132", "model.ffn=321"],
         "parallel.tp 3 does not divide model.expert_ffn 128"),
        (["parallel.ep=3"], "parallel.ep 3 does not divide model.experts 8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(overrides: list[str], text: str) -> None:
    """In one sentence that names the setting."""
    with pytest.raises(ConfigError, match=text):
        load("tiny-moe", ["data.shards=/data", *overrides], {})


def test_a_dense_model_has_no_router_losses() -> None:
    """Weights of losses that nothing would compute are refused."""
    with pytest.raises(ConfigError, match=r"optimizer\.balance_loss needs model\.experts"):
        load("tiny", ["data.shards=/data", "optimizer.balance_loss=0.1"], {})


@pytest.mark.parametrize(
    ("size", "settings", "multiple"),
    [(6, {"ep": 4}, 4), (4, {"tp": 2, "cp": 2, "ep": 4}, 8), (2, {"cp": 2, "ep": 6}, 6)],
)
def test_ranks_that_do_not_split_are_refused(size: int, settings: dict[str, int], multiple: int) -> None:
    """The sentence says how many would; and so many do."""
    layout = ParallelSettings(**settings)
    with pytest.raises(ConfigError, match=f"start a multiple of {multiple} ranks"):
        mesh_shape(size, layout)
    assert mesh_shape(multiple, layout)["dp"] % layout.ep == 0


def test_a_whole_model_learns_everywhere() -> None:
    """A whole model: every parameter has a gradient, and each layer has sent every token to two experts."""
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    model.routing.begin(1, CPU)
    ids = torch.randint(0, 50, (2, 16))
    terms = model(ids, torch.zeros(2, 16, dtype=torch.int32), ids)
    terms.sum().backward()
    assert all(value.grad is not None for value in model.parameters())
    assert (model.routing.measured[:, LOADS:].sum(1) == 2 * 16 * 2).all()
