"""The lengths of documents in the corpora of a run, and what each stage of the run takes of the long ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from opsd.trainer.config import Config
from opsd.trainer.data.shards import place
from opsd.trainer.data.sources import Source, open_sources, sizes

LENGTHS: Final = (4096, 8192, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A source: its documents and tokens, and the share of the tokens in documents of at least so many tokens."""

    source: str
    documents: int
    tokens: int
    long: dict[int, float]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a stage draws: samples of ``sequence`` tokens of a source, of ``available`` ones.

    With ``within`` each sample lies in one document of at least ``sequence`` tokens.
    """

    start: int
    source: str
    sequence: int
    within: bool
    samples: int
    available: int

    @property
    def epochs(self) -> float:
        """How often the stage goes through what is available."""
        return self.samples / self.available


def lengths_of(source: Source, lengths: Sequence[int]) -> Lengths:
    """Raises OSError."""
    documents, tokens, long = 0, 0, dict.fromkeys(lengths, 0)
    for shard in source.index.shards:
        starts = np.memmap(place(source.folder, shard.document_file, source.fallback), np.uint64, "r").astype(np.int64)
        own = np.diff(starts, append=shard.tokens)
        documents, tokens = documents + len(own), tokens + shard.tokens
        for length in lengths:
            long[length] += int(own[own >= length].sum())
    return Lengths(source.name, documents, tokens, {length: count / tokens for length, count in long.items()})


def look(config: Config, lengths: Sequence[int] = ()) -> tuple[list[Lengths], list[Drawn]]:
    """The sources of a run, and what its stages draw from them. Raises DataError, OSError."""
    data = config.data
    sources = open_sources(data.model_copy(update={"verify": "size"}), config.model.vocab)
    wanted = sorted({*(lengths or LENGTHS), *(cut.length for cut in data.cuts().values())})
    found = [lengths_of(source, wanted) for source in sources.values()]
    available = sizes(sources, data)
    mixture, cuts = data.mix(available, config.run.seed), data.cuts()
    begins = [stage.start for stage in data.stages] or [1]
    drawn = []
    for start, end in pairwise([*begins, config.run.steps + 1]):
        before, after = mixture.drawn(data.position(start)), mixture.drawn(data.position(end))
        for name, cut in cuts.items():
            if (samples := after.get(name, 0) - before.get(name, 0)) > 0:
                drawn.append(Drawn(start, cut.source, cut.length, cut.within, samples, available[name]))
    return found, drawn
