"""The prefetch process of a rank: reads sequences ahead of the trainer. Imports numpy, never torch.

Batches go through a ring of slots in shared memory. Standard input has 8 bytes, the sample that all ranks together
begin with, and then one byte for each slot that may be filled. Each 8 bytes on standard output are the first sample of
a filled slot. The process ends with its input.
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
from itertools import cycle, groupby, islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from opsd.trainer.data.mixture import Mixture
from opsd.trainer.data.shards import open_corpus
from opsd.trainer.data.stages import Stage

SAMPLE_BYTES = 8
ORDERED_AT_ONCE = 1024
"""Samples whose position is computed together; alone one takes 0.2 ms, together less than a microsecond each."""
_PR_SET_PDEATHSIG = 1


class Form(NamedTuple):
    """From the sample ``start`` on, micro-batches have ``rows`` sequences of ``length`` tokens."""

    start: int
    length: int
    rows: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The worker's parameters; it reads for data-parallel rank ``rank`` of ``ranks``.

    ``sources`` maps the names of a mixture to a folder, its fallback ("" for none), the length of sequences and whether
    they are those within documents only. ``stages`` are starts and weights, ``forms`` the fields of ``Form``.
    """

    sources: dict[str, tuple[str, str, int, bool]]
    stages: Sequence[tuple[int, Mapping[str, float]]]
    forms: Sequence[Sequence[int]]
    skips: Sequence[tuple[int, int]]
    seed: int
    rank: int
    ranks: int
    slots: int
    ring: int
    """Descriptor of the shared memory."""
    parent: int

    @property
    def slot_bytes(self) -> int:
        """Tokens [rows, length + 1] as int64, documents [rows, length] as int32, and padding to whole words."""
        return max(-(-rows * ((length + 1) * 8 + length * 4) // 8) * 8 for _, length, rows in self.forms)


def slot_views(
    memory: mmap.mmap, plan: Plan, slot: int, form: Form
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The arrays in a slot of the ring."""
    at = slot * plan.slot_bytes
    tokens = np.ndarray((form.rows, form.length + 1), np.int64, memory, at)
    documents = np.ndarray((form.rows, form.length), np.int32, memory, at + tokens.nbytes)
    return tokens, documents


def micro_batches(plan: Plan, sample: int) -> Iterator[tuple[int, Form]]:
    """The first sample of each of this rank's micro-batches, and its form; all ranks begin with ``sample``."""
    forms = [Form(*fields) for fields in plan.forms]
    for form, end in zip(forms, [*(form.start for form in forms[1:]), 1 << 62], strict=True):
        while sample < end:
            yield sample + plan.rank * form.rows, form
            sample += plan.ranks * form.rows


def main() -> None:
    """Fill slots until the trainer is gone."""
    plan = Plan(**json.loads(sys.argv[1]))
    # A stopped process does not notice the end of its input, so the kernel is asked to end it with the rank.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != plan.parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    corpora = {
        name: open_corpus(Path(folder), Path(fallback) if fallback else None, length, within=within)
        for name, (folder, fallback, length, within) in plan.sources.items()
    }
    stages = [Stage(start, weights) for start, weights in plan.stages]
    mixture = Mixture(stages, {name: corpus.sequences for name, corpus in corpora.items()}, plan.seed, plan.skips)
    ordered = [corpora[name] for name in mixture.names]
    memory = mmap.mmap(plan.ring, plan.slots * plan.slot_bytes)
    begin = int.from_bytes(os.read(0, SAMPLE_BYTES), "little")
    for slot, (sample, form, places) in zip(cycle(range(plan.slots)), batches(mixture, plan, begin), strict=False):
        if not os.read(0, 1):
            return
        tokens, documents = slot_views(memory, plan, slot, form)
        for row, (source, sequence) in enumerate(places):
            ordered[source].read([sequence], tokens[row : row + 1], documents[row : row + 1])
        os.write(1, sample.to_bytes(SAMPLE_BYTES, "little"))


def batches(mixture: Mixture, plan: Plan, sample: int) -> Iterator[tuple[int, Form, list[list[int]]]]:
    """The first sample of each slot from ``sample`` on, its form, and source and sequence of its rows, without end."""
    for form, alike in groupby(micro_batches(plan, sample), key=lambda entry: entry[1]):
        firsts = (first for first, _ in alike)
        while found := list(islice(firsts, max(1, ORDERED_AT_ONCE // form.rows))):
            samples = np.array(found, np.uint64)[:, None] + np.arange(form.rows, dtype=np.uint64)
            places = np.stack(mixture.locate(samples.ravel()), axis=1).reshape(len(found), form.rows, 2)
            yield from zip(found, repeat(form), places.tolist(), strict=False)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)
