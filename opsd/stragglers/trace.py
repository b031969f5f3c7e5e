"""Step times of the ranks of a job, and what was concluded from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

FORWARD, BACKWARD, COMPUTE, DATA, TRANSFER, GPU, STEP = (
    "forward", "backward", "compute", "data", "transfer", "gpu", "step",
)  # fmt: skip
SLOW_WORKER, SLOW_GPU, SLOW_HOST = "slow worker", "slow GPU", "slow host"
HOST_PAUSES, SLOW_DATA, SLOW_LINK = "pauses of the host", "slow data", "slow link"
STAGES, LENGTHS = "unbalanced pipeline stages", "unequal sequence lengths"
CAUSES = (SLOW_WORKER, SLOW_GPU, SLOW_HOST, HOST_PAUSES, SLOW_DATA, SLOW_LINK, STAGES, LENGTHS)

Rows = Mapping[int, Sequence[float]]
"""Rank -> seconds in each step of the trace."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs, and its coordinates in the layout; ``node`` is "" if it is unknown."""

    node: str = ""
    gpu: int | None = None
    dp: int = 0
    pp: int = 0
    tp: int = 0
    cp: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Seconds of each phase, rank and step; all rows have a value for each of ``steps``.

    Phases: ``forward`` and ``backward``, or ``compute`` where they are not told apart: what the rank itself worked,
    without waiting. ``gpu`` is the same by CUDA events. ``data`` is waiting for the loader, ``transfer`` is
    communication without the waiting for others, ``step`` the whole step. ``microbatches`` is their number in a step
    of a pipeline, None if it is unknown. ``left_out`` are ranks with too few of the steps to be compared.
    """

    places: Mapping[int, Place]
    steps: Sequence[int]
    seconds: Mapping[str, Rows] = field(repr=False)
    microbatches: int | None = None
    left_out: Sequence[int] = ()

    def rows(self, phase: str) -> Rows | None:
        """The rows of ``phase``, None unless every rank has one."""
        rows = self.seconds.get(phase)
        return rows if rows is not None and rows.keys() >= self.places.keys() else None

    @property
    def source(self) -> str:
        """``gpu`` if the work of every rank was timed by CUDA events, else ``host``."""
        gpu = self.rows(GPU)
        return GPU if gpu is not None and all(any(row) for row in gpu.values()) else "host"

    def host_work(self) -> Rows:
        """Seconds that each rank worked in each step, by the host's clock; by the GPU's if nothing else is known."""
        parts = [rows for phase in (FORWARD, BACKWARD, COMPUTE) if (rows := self.rows(phase)) is not None]
        if not parts:
            parts = [rows for phase in (STEP, GPU) if (rows := self.rows(phase)) is not None][:1]
        return {
            rank: [sum(values) for values in zip(*(rows[rank] for rows in parts), strict=True)] for rank in self.places
        }

    def work(self) -> Rows:
        """Seconds that each rank worked in each step, by the better source."""
        return self.seconds[GPU] if self.source == GPU else self.host_work()

    def groups(self) -> list[list[int]]:
        """The ranks that do equal work: the same pipeline stage and, if enough of them have it, the same tensor place.

        Ranks of one tensor group wait for each other within a step, so that only other groups show their delay.
        """
        narrow = _grouped(self.places, lambda place: (place.pp, place.tp))
        if min(map(len, narrow)) >= LEAST_PEERS:
            return narrow
        return _grouped(self.places, lambda place: (place.pp,))

    def last(self, count: int) -> Trace:
        """The last ``count`` steps."""
        cut = {phase: {rank: row[-count:] for rank, row in rows.items()} for phase, rows in self.seconds.items()}
        return Trace(self.places, self.steps[-count:], cut, self.microbatches, self.left_out)


LEAST_PEERS = 3


def _grouped(places: Mapping[int, Place], key: object) -> list[list[int]]:
    found: dict[object, list[int]] = {}
    for rank in sorted(places):
        found.setdefault(key(places[rank]), []).append(rank)  # type: ignore[operator]
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Slowdown:
    """What slows the job down. ``culprits`` are ranks, none if the work itself is uneven.

    ``slowdown``: duration of a step in proportion to that without the cause, 1.0 if it costs nothing. ``source`` is
    ``gpu`` if the times are those of CUDA events, else ``host``. ``stage`` is the pipeline stage that takes longest,
    for ``STAGES``.
    """

    cause: str
    culprits: tuple[int, ...]
    nodes: tuple[str, ...]
    gpus: tuple[int, ...]
    slowdown: float
    confidence: float
    evidence: tuple[str, ...]
    source: str = "host"
    stage: int | None = None
    advice: str = ""


def middles(rows: Rows, ranks: Iterable[int]) -> list[float]:
    """Of each step the median over ``ranks``."""
    return [median(values) for values in zip(*(rows[rank] for rank in ranks), strict=True)]
