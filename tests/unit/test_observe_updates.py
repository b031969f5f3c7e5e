"""Writes to parameters between backward passes: the steps of optimizers that torch does not know."""

from __future__ import annotations

import pytest

from opsd.launch.observe.observer import LEAVES, ParameterVersions, leaves
from tests.fakes.graph import Loss, Parameter


def test_a_write_between_two_passes_is_seen_once() -> None:
    """Nothing is known before the first pass."""
    parameter, versions = Parameter(), ParameterVersions()
    parameter.write()
    assert not versions.changed(Loss(parameter))
    assert not versions.changed(Loss(parameter))
    parameter.write()
    parameter.write()
    assert versions.changed(Loss(parameter))
    assert not versions.changed(Loss(parameter))


def test_one_parameter_of_those_looked_at_is_enough() -> None:
    """Others are frozen, or inputs that need a gradient."""
    many, versions = [Parameter() for _ in range(LEAVES)], ParameterVersions()
    versions.changed((Loss(*many),))
    many[1].write()
    assert versions.changed((Loss(*many),))


def test_parameters_that_are_gone_are_replaced() -> None:
    """A program trains one model after another, and the tensors of the first must not stay in memory."""
    versions = ParameterVersions()
    for _ in range(2):
        parameter = Parameter()
        seen = []
        for _ in range(3):
            seen.append(versions.changed(Loss(parameter)))
            parameter.write()
        assert seen == [False, True, True]
        del parameter


def test_a_loss_without_a_graph_has_none() -> None:
    """Such as a number, or nothing at all."""
    assert leaves(None) == leaves([]) == leaves(1.0) == []


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_torch_counts_the_writes_of_any_optimizer(*, compiled: bool) -> None:
    """One that is written by hand, and a compiled step; a forward pass writes nothing to a parameter."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model, versions = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), ParameterVersions()
    optimizer = torch.optim.SGD(model.parameters())

    def by_hand() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    update = torch.compile(optimizer.step, backend="aot_eager") if compiled else by_hand
    seen = []
    for step in (lambda: None, update, update, lambda: None):
        loss = model(torch.randn(2, 4)).sum()
        seen.append(versions.changed(loss))
        loss.backward()
        step()
    assert seen == [False, False, True, True]
