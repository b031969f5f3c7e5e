"""Step times of real jobs (``tests/outside/step_times``): the cause, the culprit, and the slowdown within 10 %.

They are judged after the fact, so that there is no latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from opsd.scenarios.verdict import Hit, ScenarioResult
from opsd.stragglers.judge import judge
from opsd.stragglers.table import read_table
from opsd.stragglers.trace import LENGTHS, SLOW_WORKER, STAGES

TRUTH: Mapping[str, tuple[str, float, tuple[int, ...]]] = {
    "AR": (SLOW_WORKER, 1.973, (0,)),
    "ST": (STAGES, 1.179, ()),
    "SE": (LENGTHS, 1.537, ()),
}
"""Cause, slowdown and culprits that the source found."""


def results(folder: Path) -> Iterator[ScenarioResult]:
    """The result of each trace. A cause that is not the source's is one that was missed and one too many."""
    for name, (cause, slowdown, culprits) in TRUTH.items():
        verdicts = judge(read_table(folder / "step_times" / f"{name}.csv"))
        found = [verdict.cause for verdict in verdicts]
        if cause not in found:
            yield ScenarioResult((), (cause,), tuple(found), (f"{name}: {found} instead of {cause}",))
            continue
        verdict = verdicts[found.index(cause)]
        right = verdict.culprits == culprits and abs(verdict.slowdown / slowdown - 1) <= 0.1
        others = tuple(other for other in found if other != cause)
        problems = () if right else (f"{name}: {verdict.culprits}, {verdict.slowdown:.2f}",)
        yield ScenarioResult((Hit(cause, None, right),), (), others, problems)
