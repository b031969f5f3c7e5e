"""The cost of work beside a run, studies and data pipelines: lines in the run's folder, each time that it is known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from opsd import durable
from opsd.ledger.ledger import Opener, open_run_file, read_lines
from opsd.words import plural

ABLATIONS: Final = "ablations.jsonl"
DATA: Final = "data.jsonl"
_MOST: Final = 1e12


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


@dataclass(frozen=True, slots=True)
class DataRun:
    """A pipeline that made data for a run: its file, its tasks, and its core-hours with those lost to retries."""

    pipeline: str
    tasks: int
    done: int
    core_hours: float
    lost_core_hours: float


Beside = TypeVar("Beside", bound=Ablation | DataRun)


def note(folder: Path, told: Ablation | DataRun, t: float) -> None:
    """Write down what ``told`` has cost up to the epoch second ``t``, unless that is known. Raises OSError."""
    with suppress(FileNotFoundError):
        if told in read(type(told), folder):
            return
    durable.append(folder / _file(type(told)), json.dumps({"t": t, **asdict(told)}).encode() + b"\n")


def read(kind: type[Beside], folder: Path, opener: Opener = open_run_file) -> list[Beside]:
    """The studies or pipelines beside the run in ``folder``, each as it was seen last. Raises OSError."""
    return parse(kind, read_lines(folder / _file(kind), ("t", *(field.name for field in fields(kind))), opener))


def parse(kind: type[Beside], lines: Iterable[Mapping[str, Any]]) -> list[Beside]:
    """Those of ``lines`` that are sound, of each study or pipeline the last."""
    name, *numbers = fields(kind)
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        values: dict[str, Any] = {field.name: line.get(field.name) for field in numbers}
        types = {field.name: int if field.type == "int" else (int, float) for field in numbers}
        if all(isinstance(value, types[each]) and 0 <= value < _MOST for each, value in values.items()):
            found[str(line.get(name.name))[:256]] = values
    return [kind(title, **values) for title, values in found.items()]


def _file(kind: type[object]) -> str:
    return ABLATIONS if kind is Ablation else DATA


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


def data_line(pipelines: Sequence[DataRun], planned_gpu_hours: float | None) -> str:
    """What all pipelines cost, beside the plan of the run if it has one; "" without a pipeline."""
    if not pipelines:
        return ""
    hours, lost = (sum(getattr(each, name) for each in pipelines) for name in ("core_hours", "lost_core_hours"))
    retries = f", {lost:,.2f} lost to retries" if lost >= 0.005 else ""
    plan = f", beside {planned_gpu_hours:,.0f} GPU-hours planned" if planned_gpu_hours else ""
    return f"{hours:,.2f} core-hours of {plural(len(pipelines), 'pipeline')}{retries}{plan}"
