"""Step times of real jobs (``tests/outside/step_times``): the cause, the culprit, and the slowdown within 10 %.

They are judged after the fact, so that there is no latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from opsd.scenarios.player import Hit, ScenarioResult
from opsd.stragglers.judge import judge
from opsd.stragglers.table import read_table
from opsd.stragglers.trace import LENGTHS, SLOW_WORKER, STAGES

ALSO: Mapping[str, tuple[str, ...]] = {"SE": (STAGES,)}
"""Further causes, without a slowdown of their own: the last stage explains 0.69 of the slowdown by ``ms-SE.json``."""

TRUTH: Mapping[str, tuple[str, float, tuple[int, ...]]] = {
    "AR": (SLOW_WORKER, 1.973, (0,)),
    "ST": (STAGES, 1.179, ()),
    "SE": (LENGTHS, 1.537, ()),
}
"""The main cause, the slowdown and the culprits that the source found."""


def results(folder: Path) -> Iterator[ScenarioResult]:
    """The result of each trace, from the folder of all sets."""
    yield from judged(folder / "step_times", "{}.csv")


def judged(folder: Path, file: str) -> Iterator[ScenarioResult]:
    """The result of each trace; ``file`` is its name with a place for that of the trace.

    A cause that is not the source's is one that was missed and one too many.
    """
    for name, (cause, slowdown, culprits) in TRUTH.items():
        trace = read_table(folder / file.format(name))
        verdicts = judge(trace)
        found = [verdict.cause for verdict in verdicts]
        if cause not in found:
            yield ScenarioResult((), (cause,), tuple(found), (f"{name}: {found} instead of {cause}",))
            continue
        verdict = verdicts[found.index(cause)]
        right = verdict.culprits == culprits and abs(verdict.slowdown / slowdown - 1) <= 0.1
        also, last = ALSO.get(name, ()), max(place.pp for place in trace.places.values())
        right = right and verdict.stage in (None, last)
        hits = [Hit(cause, None, right)]
        hits += [Hit(other.cause, None, other.stage == last) for other in verdicts if other.cause in also]
        missed = tuple(other for other in also if other not in found)
        others = tuple(other for other in found if other not in (cause, *also))
        problems = () if right else (f"{name}: {verdict.culprits}, {verdict.slowdown:.2f}",)
        yield ScenarioResult(tuple(hits), missed, others, problems)
