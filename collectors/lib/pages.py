"""Facts from rank pages."""

from __future__ import annotations

from collections.abc import Sequence

from opsd.collectors.base import RankFact, StepFact
from opsd.rank_page import PHASES, RankPage


def step_facts(page: RankPage, known: Sequence[StepFact]) -> tuple[StepFact, ...]:
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
            dict(zip(PHASES, s.phase_s, strict=True)),
            s.learning_rate,
        )
        for s in page.steps
    )


def rank_fact(
    page: RankPage, run: str, process: str | None, workers: Sequence[str | None], steps: tuple[StepFact, ...]
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
