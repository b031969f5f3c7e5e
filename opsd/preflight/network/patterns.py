"""Communication patterns: pure schedules over ranks 0 to n-1."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

Pair = tuple[int, int]


def circle(n: int) -> list[list[Pair]]:
    """All pairs of n ranks in rounds of disjoint pairs (round-robin tournament, circle method).

    An even n takes n-1 rounds of n/2 pairs; an odd one n rounds, and in each of them one rank is idle.
    """
    seats: list[int | None] = [*range(n)] + ([None] if n % 2 else [])
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def ring(n: int) -> list[list[Pair]]:
    """Neighbours on a ring: every rank sends to the next one at the same time."""
    return [[(rank, (rank + 1) % n) for rank in range(n)]]


def permutations(n: int, count: int, random: Random) -> list[list[Pair]]:
    """``count`` random assignments in which every rank sends to one other and receives from one other."""
    rounds = []
    for _ in range(count):
        order = [*range(n)]
        random.shuffle(order)
        rounds.append(sorted(zip(order, [*order[1:], order[0]], strict=True)))
    return rounds


def incast(n: int, target: int = 0) -> list[list[Pair]]:
    """All ranks send to one rank at the same time."""
    return [[(rank, target) for rank in range(n) if rank != target]]


def partner(rank: int, pairs: Sequence[Pair]) -> int | None:
    """The partner of ``rank`` in a round of disjoint pairs, None if it is idle."""
    for one, other in pairs:
        if rank in (one, other):
            return other if rank == one else one
    return None
