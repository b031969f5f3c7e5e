"""Facts of collectors for tests."""

from __future__ import annotations

from dataclasses import replace

from opsd.collectors.base import RankFact, StepFact


def rank(number: int, **changes: object) -> RankFact:
    """A rank of a job of four that trains: rank i on GPU i."""
    base = RankFact(
        run="smol", job="4242", rank=number, local_rank=number, world_size=4, generation=1, gpu=number,
        pid=1000 + number, state="running", process="S", phase="forward", phase_since=100.0, changed=100.0,
        steps_reported=0, committed_step=None, workers=(), steps=(),
    )  # fmt: skip
    return replace(base, **changes)


def steps(count: int, *, until: float, **phase_s: float) -> tuple[StepFact, ...]:
    """The last ``count`` steps up to the monotonic second ``until``, each as long as its phases together."""
    duration = sum(phase_s.values())
    return tuple(
        StepFact(number, until - (count - 1 - number) * duration, duration, 1024, 2.5, 1.0, phase_s)
        for number in range(count)
    )
