"""When a step of a program is done that has several optimizers, or one that passes no hook of torch."""

from __future__ import annotations

import weakref
from typing import Any

LEAVES = 4
"""Parameters that are looked at; an input that needs a gradient may be among them."""
MAX_NODES = 10_000
"""Of the graph of a backward pass, in which they are searched."""


class ParameterVersions:
    """Whether parameters have been written to between two backward passes: torch counts the writes of each tensor.

    So steps are seen of optimizers that are compiled, or are no ``torch.optim``.
    """

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


class StepCycle:
    """Several optimizers take turns (Muon and AdamW, a GAN's two): a step is done when each has had its turn.

    Which optimizers that are is learned from the first turn on. One that steps more rarely than the others does not
    count. When a program exchanges its optimizer, a step or two go uncounted.
    """

    def __init__(self) -> None:
        self._expected: frozenset[int] = frozenset()
        self._turn: set[int] = set()
        self._counted = False
        self._learning = True

    def stepped(self, optimizer: int) -> bool:
        """Whether the step of this optimizer, known by any number, completes a step of the program."""
        if optimizer in self._turn:
            common = self._turn if self._learning else self._turn & self._expected
            self._expected, self._learning = frozenset(common or self._turn), False
            self._turn, self._counted = set(), False
        self._turn.add(optimizer)
        if self._counted or not self._turn >= self._expected:
            return False
        self._counted = True
        return True
