"""Benchmarks: each measures opsd and comparable programs in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opsd.dependents import Dependents

MEMORY = Path("/dev/shm")  # noqa: S108 (the folder in it is made by mkdtemp)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A new folder in shared memory; it goes at the end of the block, or with the program.

    Whatever is started meanwhile ends first, since it might write into the folder again.
    """
    with Dependents() as mine:
        mine.claim_descendants()
        yield mine.temporary("opsd-bench-", MEMORY)


class BenchError(Exception):
    """The benchmark cannot be run; the message says why."""
