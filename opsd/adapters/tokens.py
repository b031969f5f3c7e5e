"""Tokens of a rank, where several ranks compute the same batch together."""

from __future__ import annotations

from fractions import Fraction


class Share:
    """This rank's part of the tokens of its batches, so that the sum over all ranks is what was trained on."""

    def __init__(self) -> None:
        self._waiting = Fraction()

    def add(self, tokens: int, sharing: int = 1) -> None:
        """Add a batch that ``sharing`` ranks (tensor, context or pipeline parallel) compute together."""
        self._waiting += Fraction(tokens, sharing)

    def take(self) -> int:
        """The whole tokens added since the last call; fractions are kept for the next."""
        tokens = int(self._waiting)
        self._waiting -= tokens
        return tokens
