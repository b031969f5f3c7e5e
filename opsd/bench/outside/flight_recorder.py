"""Recorded hangs of a job on 16 GPUs (``tests/outside/fr_traces``): which ranks stopped the others.

They are judged after the fact, so that there is no latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from opsd.collectors.lib.nccl.desync import judge, read_dumps
from opsd.scenarios.player import Hit, ScenarioResult

CULPRITS: Mapping[str, tuple[int, ...]] = {
    "gpu_error_1st": (12,), "gpu_error_2nd": (9, 14), "lock_gil_1st": (9, 14), "lock_gil_2nd": (10, 15),
}  # fmt: skip
"""The ranks that the source names."""


def results(folder: Path) -> Iterator[ScenarioResult]:
    """The result of each hang, from the folder of all sets."""
    yield from judged(folder / "fr_traces")


def judged(folder: Path) -> Iterator[ScenarioResult]:
    """The result of each hang, from the folder that has one for each."""
    for case, culprits in CULPRITS.items():
        verdict = judge(read_dumps(folder / case).dumps)
        if verdict is None:
            yield ScenarioResult((), ("collective_hang",), (), (f"{case}: no verdict",))
            continue
        right = verdict.culprits == culprits
        problems = () if right else (f"{case}: {verdict.culprits} instead of {culprits}",)
        yield ScenarioResult((Hit("collective_hang", None, right),), (), (), problems)
