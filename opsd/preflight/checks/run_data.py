"""The run's data: how fast one reader delivers sequences, at the beginning and at step one billion."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from opsd.preflight.base import (
    Check,
    Context,
    CouldNotRunError,
    Finding,
    Measure,
    Measurement,
    Outcome,
    Progress,
    quantity,
)
from opsd.preflight.base import Verdict as V
from opsd.preflight.checks.storage import READ_MARGIN
from opsd.preflight.training import RunPlan, config_of, plan_of

if TYPE_CHECKING:
    from opsd.trainer.config import Config

FAR_STEP: Final = 1_000_000_000
SAME_SPEED: Final = 0.8
"""Below this share of its initial speed, the loader's cost grows with the step."""
TURNS: Final = 8
"""How often the two positions take turns; medians count."""
BATCH: Final = 64
MANY: Final = 0.01
"""Share of the tokens of a corpus that may be left over at the ends of its shards."""


def run(context: Context, progress: Progress) -> Outcome:
    """Read in the run's order, without training, at both positions in turn: a slow moment of the node hits both."""
    config = config_of(context)
    start, far = _Reader(config, 0), _Reader(config, FAR_STEP * config.data.batch)
    speeds = list[tuple[float, float]]()
    for turn in range(TURNS):
        seconds = context.seconds / (2 * TURNS)
        speeds.append((start.tokens_per_s(seconds), far.tokens_per_s(seconds)))
        progress((turn + 1) / TURNS, "")
    at_start, at_far = (median(each) for each in zip(*speeds, strict=True))
    measured = (Measurement("speed", at_start, "start"), Measurement("speed", at_far, "step 1e9"))
    slow = _too_slow(min(at_start, at_far), config, plan_of(context, config))
    growing = _growing(median(far / start for start, far in speeds))
    return Outcome(measured, (*growing, *slow, *_unread(config), *_mixed(config)))


def _unread(config: Config) -> Iterator[Finding]:
    """The parts of the corpora's sources that the run does not read."""
    from opsd.trainer.data.shards import find_index, summary

    data = config.data
    for name in data.sources:
        index = find_index(Path(data.shards, name), Path(data.fallback, name) if data.fallback else None)
        counts = summary(index, max(cut.length for cut in data.cuts().values() if cut.source == name))
        unread = {what: count for what, count in counts.items() if what.endswith("dropped") and count}
        *_, (ends, left) = counts.items()
        if left > MANY * sum(shard.tokens for shard in index.shards):
            unread[ends] = left
        if unread:
            listed = "; ".join(f"{count:,} {what}" for what, count in unread.items())
            yield Finding(
                V.WARN, f"not all of the corpus is read: {listed}", f"look at {Path(data.shards, name)}", name
            )


def _mixed(config: Config) -> Iterator[Finding]:
    """Sources that were tokenised by different code, whose tokens may differ for the same text."""
    from opsd.trainer.data.sources import made_differently, open_sources

    sources = open_sources(config.data.model_copy(update={"verify": "size"}), config.model.vocab)
    if told := made_differently(list(sources.values())):
        yield Finding(V.WARN, told, "make the older one again if text of the same kind should have the same tokens")


class _Reader:
    """One process that reads samples in the run's order from ``position`` on. Raises CouldNotRunError."""

    def __init__(self, config: Config, position: int) -> None:
        from opsd.trainer.data.shards import DataError, open_corpus
        from opsd.trainer.data.sources import open_sources, sizes

        try:
            sources = open_sources(config.data.model_copy(update={"verify": "size"}), config.model.vocab)
            self._mixture = config.data.mix(sizes(sources, config.data), config.run.seed)
            cuts = config.data.cuts()
            self._corpora = [
                open_corpus(sources[cut.source].folder, sources[cut.source].fallback, cut.length, within=cut.within)
                for cut in map(cuts.__getitem__, self._mixture.names)
            ]
        except DataError as error:
            raise CouldNotRunError(str(error)) from error
        self._position = position

    def tokens_per_s(self, seconds: float) -> float:
        """The speed of the next ``seconds``; at least one batch is read."""
        import numpy as np

        read, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds or not read:
            positions = np.arange(BATCH, dtype=np.uint64) + np.uint64(self._position)
            for source, sequence in zip(*self._mixture.locate(positions), strict=True):
                corpus = self._corpora[int(source)]
                tokens, documents = np.empty((1, corpus.length + 1), np.int64), np.empty((1, corpus.length), np.int32)
                corpus.read([int(sequence)], tokens, documents)
                read += corpus.length
            self._position += BATCH
        return read / elapsed if elapsed else 0.0


def _growing(share: float) -> Iterator[Finding]:
    """``share``: the speed at the far position over that at the start."""
    if share < SAME_SPEED:
        summary = f"at step 1e9 the loader reaches {share:.0%} of the speed that it has at the start"
        yield Finding(V.FAIL, summary, "its cost grows with the step count; see `opsd runbook show dataloader_growth`")


def _too_slow(speed: float, config: Config, plan: RunPlan) -> Iterator[Finding]:
    """One reader serves a data-parallel rank and has to be able to catch up after a stall."""
    if plan.tokens_per_s is None:
        return
    parallel = config.parallel
    needed = plan.tokens_per_s / max(1, plan.ranks // (parallel.tp * parallel.pp * parallel.cp))
    if speed < READ_MARGIN * needed:
        summary = (
            f"a reader delivers {quantity(speed, 'tokens_per_second')}, {speed / needed:.1f} times what its rank "
            f"consumes ({quantity(needed, 'tokens_per_second')})"
        )
        verdict = V.FAIL if speed < needed else V.WARN
        yield Finding(verdict, summary, f"{READ_MARGIN:g} times leave room to catch up: stage the shards on local NVMe")


CHECK = Check(
    name="run_data",
    title="Data of the run",
    run=run,
    seconds={"quick": 4, "standard": 20, "burn-in": 60},
    measures=(Measure("speed", "tokens_per_second", "tokens that one reader delivers", "higher", noise=0.25),),
    needs=frozenset({"run", "torch", "exclusive"}),
    advice="stage the shards on local NVMe",
    runbook="dataloader_stall",
)
