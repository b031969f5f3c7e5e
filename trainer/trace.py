"""Checksums of what a rank computes in a forward and a backward pass, in the order of computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from opsd.trainer.checksums import bit_sum
from opsd.trainer.model import Decoder
from opsd.trainer.regions import local_part


class Trace:
    """One pass. ``names`` and ``sums`` belong together; ``forward`` of them are of the forward pass."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sums: list[torch.Tensor] = []
        self.forward = 0
        self._counts: Counter[str] = Counter()

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add the bits of this rank's part of ``values``; without waiting for the device."""
        self._counts[name] += 1
        count = self._counts[name]
        self.names.append(name if count == 1 else f"{name}, time {count}")
        self.sums.append(bit_sum(local_part(values)))

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient; of a tensor hook, which may not return anything."""
        self.add(f"the gradient of {name}", gradient)

    def packed(self) -> torch.Tensor:
        """All sums, int64 [n]."""
        return torch.stack(self.sums)


@contextmanager
def recorded(model: Decoder, *, products: bool) -> Iterator[Trace]:
    """A trace of the one pass of ``model`` in the context.

    It has the results of the layers and the gradients of all parameters as this rank computes them, before they are
    reduced over ranks. With ``products`` it also has what goes in and out of every matrix and norm, before and after
    the communication between them, and the gradients of these.
    """
    trace = Trace()
    with ExitStack() as hooks:
        units = {"model": model, **{f"layer {number}": block for number, block in model.blocks.items()}}
        inner = {id(parameter) for block in model.blocks.values() for parameter in block.parameters()}
        for name, unit in units.items():
            names = [n for n, value in unit.named_parameters() if unit is not model or id(value) not in inner]
            prefix = "" if unit is model else f"blocks.{name.removeprefix('layer ')}."
            _enter(hooks, unit.register_forward_pre_hook(partial(_watch_parameters, trace, hooks, prefix, names)))
            if unit is not model:
                _enter(hooks, unit.register_forward_hook(partial(_watch_output, trace, name), prepend=True))
        _enter(hooks, model.register_forward_hook(partial(_end_forward, trace)))
        for name, module in model.named_modules() if products else ():
            if not list(module.children()):
                _enter(hooks, module.register_forward_pre_hook(partial(_watch_input, trace, name)))
                _enter(hooks, module.register_forward_hook(partial(_watch_output, trace, name), prepend=True))
        yield trace


def _enter(hooks: ExitStack, handle: Any) -> None:
    hooks.callback(handle.remove)


def _watch_parameters(
    trace: Trace, hooks: ExitStack, prefix: str, names: list[str], module: nn.Module, _inputs: object
) -> None:
    """FSDP has gathered them by now. Their gradients come here before it reduces them."""
    for name in names:
        _enter(hooks, _on_gradient(module.get_parameter(name), trace, f"{prefix}{name}"))


def _watch_input(trace: Trace, name: str, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    _watch(trace, f"the input of {name}", inputs[0])


def _watch_output(trace: Trace, name: str, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
    _watch(trace, f"the result of {name}", output)


def _watch(trace: Trace, name: str, values: torch.Tensor) -> None:
    trace.add(name, values)
    if values.requires_grad:
        _on_gradient(values, trace, name)


def _on_gradient(values: torch.Tensor, trace: Trace, name: str) -> Any:
    return values.register_hook(partial(trace.add_gradient, name))  # type: ignore[no-untyped-call]


def _end_forward(trace: Trace, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
    trace.add("the loss" if output.dim() == 0 else "what goes to the next stage", output)
    trace.forward = len(trace.names)
