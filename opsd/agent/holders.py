"""Who worked on this node when: the ranks as intervals of time, so that evidence names who was there when it struck."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from opsd.collectors.base import RankFact

SLACK_S: Final = 5.0
"""Seconds around its interval in which a rank may still have been there: it is looked at once a second or later."""
MAX_ENDED: Final = 1_000
"""Ranks that are gone and remembered: those that ended last."""

_Name = tuple[str, int, int, int]


@dataclass(slots=True)
class _Stay:
    fact: RankFact
    begin: float
    end: float | None = None


class Holders:
    """Used in one thread. Times are epoch seconds."""

    def __init__(self) -> None:
        self._here: dict[_Name, _Stay] = {}
        self._gone: list[_Stay] = []

    def note(self, ranks: Iterable[RankFact], now: float) -> None:
        """Take in what the rank pages tell; while they cannot be read nobody is known to have left."""
        live = {(rank.run, rank.rank, rank.generation, rank.pid): rank for rank in ranks if rank.live}
        for name in self._here.keys() - live.keys():
            stay = self._here.pop(name)
            stay.end, stay.fact = now, replace(stay.fact, steps=())
            self._gone.append(stay)
        for name, rank in live.items():
            stay = self._here.setdefault(name, _Stay(rank, now))
            stay.fact = rank
        del self._gone[:-MAX_ENDED]

    def at(self, second: float) -> Sequence[RankFact]:
        """The ranks that were here at ``second``; of two that followed each other the one that came first."""
        return [
            stay.fact
            for stay in (*self._gone, *self._here.values())
            if stay.begin - SLACK_S <= second and (stay.end is None or second <= stay.end + SLACK_S)
        ]

    def shift(self, seconds: float) -> None:
        """Move all times by a step of the wall clock."""
        for stay in (*self._gone, *self._here.values()):
            stay.begin += seconds
            stay.end = None if stay.end is None else stay.end + seconds
