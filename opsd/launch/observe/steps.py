"""When a step of a program with several optimizers is done."""

from __future__ import annotations


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
