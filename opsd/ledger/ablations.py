"""What the studies beside a run cost: a line in the run's folder each time that a study is looked at."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from opsd import durable
from opsd.ledger.records import Opener, open_run_file, read_lines

ABLATIONS: Final = "ablations.jsonl"
_MOST: Final = 1e12
_HOURS: Final = ("gpu_hours", "preempted_gpu_hours", "recomputed_gpu_hours", "failed_gpu_hours")


@dataclass(frozen=True, slots=True)
class Ablation:
    """A study beside a run: its file, its cells, and its GPU-hours with those of them that brought nothing."""

    study: str
    cells: int
    done: int
    gpu_hours: float
    preempted_gpu_hours: float = 0.0
    recomputed_gpu_hours: float = 0.0
    failed_gpu_hours: float = 0.0


def note_ablation(folder: Path, told: Ablation, t: float) -> None:
    """Write down what a study has cost up to the epoch second ``t``, unless that is known. Raises OSError."""
    with suppress(FileNotFoundError):
        if told in read_ablations(folder):
            return
    durable.append(folder / ABLATIONS, json.dumps({"t": t, **asdict(told)}).encode() + b"\n")


def read_ablations(folder: Path, opener: Opener = open_run_file) -> list[Ablation]:
    """The studies beside the run in ``folder``, each as it was seen last. Raises OSError."""
    names = ("t", *Ablation.__dataclass_fields__)
    return ablations_of(read_lines(folder / ABLATIONS, names, opener))


def ablations_of(lines: Iterable[Mapping[str, Any]]) -> list[Ablation]:
    """Those of ``lines`` that are sound, of each study the last."""
    found = {}
    for line in lines:
        counts, hours = [line.get("cells"), line.get("done")], [line.get(name) for name in _HOURS]
        sound = all(isinstance(each, int | float) and 0 <= each < _MOST for each in hours)
        if sound and all(isinstance(each, int) and 0 <= each < _MOST for each in counts):
            found[str(line.get("study"))[:256]] = {name: line[name] for name in ("cells", "done", *_HOURS)}
    return [Ablation(study, **values) for study, values in found.items()]


def ablations_line(studies: Sequence[Ablation], planned_gpu_hours: float | None) -> str:
    """What all studies cost, beside the plan of the run if it has one; "" without a study."""
    if not studies:
        return ""
    hours = sum(each.gpu_hours for each in studies)
    share = f", {hours / planned_gpu_hours:.1%} of the plan" if planned_gpu_hours else ""
    lost = (
        (sum(each.preempted_gpu_hours for each in studies), "preempted"),
        (sum(each.recomputed_gpu_hours for each in studies), "recomputed"),
        (sum(each.failed_gpu_hours for each in studies), "failed"),
    )
    parts = "".join(f", {value:,.2f} {word}" for value, word in lost if value >= 0.005)
    return f"{hours:,.2f} GPU-hours of {len(studies)} {'study' if len(studies) == 1 else 'studies'}{share}{parts}"
