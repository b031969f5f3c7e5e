"""The prefetch process of a rank: reads sequences ahead of the trainer. Imports numpy, never torch.

Batches go through a ring of slots in shared memory. Standard input has 8 bytes, the first sample, and then one byte for
each slot that may be filled. Each 8 bytes on standard output are the first sample of a filled slot. The process ends
with its input.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from opsd.trainer.data.mixture import Mixture
from opsd.trainer.data.shards import open_corpus
from opsd.trainer.data.stages import Stage

SAMPLE_BYTES = 8
ORDERED_AT_ONCE = 1024
"""Samples whose position is computed together; alone one takes 0.2 ms, together less than a microsecond each."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The worker's parameters: ``rows`` sequences per slot; those of the next slot are ``stride`` samples further on.

    ``sources`` maps names to a folder and its fallback ("" for none), ``stages`` are starts and weights.
    """

    sources: dict[str, tuple[str, str]]
    stages: Sequence[tuple[int, Mapping[str, float]]]
    skips: Sequence[tuple[int, int]]
    seed: int
    length: int
    rows: int
    slots: int
    stride: int
    ring: int
    """Descriptor of the shared memory."""
    parent: int

    @property
    def slot_bytes(self) -> int:
        """Tokens [rows, length + 1] as int64, documents [rows, length] as int32, and padding to whole words."""
        return -(-self.rows * ((self.length + 1) * 8 + self.length * 4) // 8) * 8


def slot_views(memory: mmap.mmap, plan: Plan, slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The arrays in a slot of the ring."""
    at = slot * plan.slot_bytes
    shape = (plan.rows, plan.length + 1)
    tokens = np.ndarray(shape, np.int64, memory, at)
    documents = np.ndarray((plan.rows, plan.length), np.int32, memory, at + tokens.nbytes)
    return tokens, documents


def main() -> None:
    """Fill slots until the trainer is gone."""
    plan = Plan(**json.loads(sys.argv[1]))
    # A stopped process does not notice the end of its input, so the kernel is asked to end it with the rank.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != plan.parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    corpora = {
        name: open_corpus(Path(folder), Path(fallback) if fallback else None, plan.length)
        for name, (folder, fallback) in plan.sources.items()
    }
    stages = [Stage(start, weights) for start, weights in plan.stages]
    mixture = Mixture(stages, {name: corpus.sequences for name, corpus in corpora.items()}, plan.seed, plan.skips)
    ordered = [corpora[name] for name in mixture.names]
    memory = mmap.mmap(plan.ring, plan.slots * plan.slot_bytes)
    slots = [slot_views(memory, plan, slot) for slot in range(plan.slots)]
    begin = int.from_bytes(os.read(0, SAMPLE_BYTES), "little")
    for (tokens, documents), (sample, places) in zip(cycle(slots), batches(mixture, plan, begin), strict=False):
        if not os.read(0, 1):
            return
        for row, (source, sequence) in enumerate(places):
            ordered[source].read([sequence], tokens[row : row + 1], documents[row : row + 1])
        os.write(1, sample.to_bytes(SAMPLE_BYTES, "little"))


def batches(mixture: Mixture, plan: Plan, sample: int) -> Iterator[tuple[int, list[list[int]]]]:
    """The first sample of each slot from ``sample`` on, with source and sequence of its rows, without end."""
    count = max(1, ORDERED_AT_ONCE // plan.rows)
    offsets = (np.arange(count)[:, None] * plan.stride + np.arange(plan.rows)).astype(np.uint64)
    while True:
        places = mixture.locate((offsets + np.uint64(sample)).ravel())
        for batch in np.stack(places, axis=1).reshape(count, plan.rows, 2).tolist():
            yield sample, batch
            sample += plan.stride


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)
