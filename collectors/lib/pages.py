"""What the ranks collector needs of a rank page, as protocols. The module ``opsd.rank_page`` fits them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from opsd.collectors.base import RankFact, StepFact


class Step(Protocol):
    """One completed step; seconds, ``end`` on the monotonic clock."""

    @property
    def step(self) -> int: ...
    @property
    def end(self) -> float: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def phase_s(self) -> Sequence[float]: ...
    @property
    def learning_rate(self) -> float | None: ...


class RankPageLike(Protocol):
    """A consistent copy of a rank page."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def gpu(self) -> int | None: ...
    @property
    def pid(self) -> int: ...
    @property
    def job(self) -> str: ...
    @property
    def created(self) -> float: ...
    @property
    def state(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def phase_since(self) -> float: ...
    @property
    def changed(self) -> float: ...
    @property
    def steps_reported(self) -> int: ...
    @property
    def committed_step(self) -> int | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def workers(self) -> tuple[tuple[int, str], ...]: ...
    @property
    def flops_per_token(self) -> float | None: ...
    @property
    def peak_flops(self) -> float | None: ...
    @property
    def steps(self) -> Sequence[Step]: ...


P = TypeVar("P", bound=RankPageLike)


class Client(Protocol[P]):
    """The reading side of the rank page: the module ``opsd.rank_page``."""

    @property
    def PHASES(self) -> Sequence[str]: ...
    @property
    def PageError(self) -> type[Exception]: ...

    def read_page(self, path: Path, known: P | None = None) -> P:
        """Read one page, of which ``known`` is an earlier copy. Raises ``PageError`` if none can be used."""
        ...

    def process_state(self, page: P) -> str | None:
        """The kernel's state letter of the rank's process, None if it is gone."""
        ...

    def process_start(self, pid: int) -> int | None:
        """Start time of a process in clock ticks since boot, None if there is no such process."""
        ...


def step_facts(page: RankPageLike, phases: Sequence[str], known: Sequence[StepFact]) -> tuple[StepFact, ...]:
    """The steps of ``page``; those among ``known``, the facts of an earlier look, are not made again."""
    before = {fact.end: fact for fact in known}
    return tuple(
        before.get(s.end)
        or StepFact(
            s.step,
            s.end,
            s.duration_s,
            s.tokens,
            s.loss,
            s.grad_norm,
            dict(zip(phases, s.phase_s, strict=True)),
            s.learning_rate,
        )
        for s in page.steps
    )


def rank_fact(
    page: RankPageLike, run: str, process: str | None, workers: Sequence[str | None], steps: tuple[StepFact, ...]
) -> RankFact:
    """The page as a fact about the rank ``page.rank`` of ``run``; ``process`` and ``workers`` are state letters."""
    return RankFact(
        run=run,
        job=page.job,
        rank=page.rank,
        local_rank=page.local_rank,
        world_size=page.world_size,
        generation=page.generation,
        gpu=page.gpu,
        pid=page.pid,
        state=page.state,
        process=process,
        phase=page.phase,
        phase_since=page.phase_since,
        changed=page.changed,
        steps_reported=page.steps_reported,
        committed_step=page.committed_step,
        workers=page.workers,
        steps=steps,
        worker_process=tuple(workers),
    )
