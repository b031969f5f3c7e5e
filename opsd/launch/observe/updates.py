"""Steps of programs whose optimizer passes no hook of torch: compiled ones, and those that are no ``torch.optim``.

All of them write to the parameters, and torch counts writes for each tensor.
"""

from __future__ import annotations

import weakref
from typing import Any

LEAVES = 4
"""Parameters that are looked at; an input that needs a gradient may be among them."""
MAX_NODES = 10_000
"""Of the graph of a backward pass, in which they are searched."""


class ParameterVersions:
    """Whether parameters have been written to between two backward passes."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Any], int]] = []

    def changed(self, losses: Any) -> bool:
        """Whether those of an earlier pass have been written to since; the next pass, of ``losses``, begins."""
        alive = [(ref, tensor, version) for ref, version in self._known if (tensor := ref()) is not None]
        changed = any(tensor._version != version for _, tensor, version in alive)
        self._known = [(ref, tensor._version) for ref, tensor, _ in alive]
        if not self._known:
            self._known = [(weakref.ref(tensor), tensor._version) for tensor in leaves(losses)]
        return changed


def leaves(losses: Any) -> list[Any]:
    """Some of the tensors that a backward pass computes gradients for."""
    tensors = losses if isinstance(losses, list | tuple) else (losses,)
    nodes, seen, found = [getattr(tensor, "grad_fn", None) for tensor in tensors], set[int](), list[Any]()
    while nodes and len(found) < LEAVES and len(seen) < MAX_NODES:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if (tensor := getattr(node, "variable", None)) is not None:
            found.append(tensor)
        else:
            nodes += [following for following, _ in node.next_functions]
    return found
