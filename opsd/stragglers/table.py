"""Reads step times from a table of anybody's: CSV, JSON or Parquet, one row for each rank and step, or for each phase.

Wide: columns for rank and step, and one for each phase; of a step done again after a restart the last row counts.
Long: a column with the phase (or the type of an operation) and one with its duration; rows of the same rank, step and
phase are added up. Names of columns are those of this module or of ByteDance's StragglerAnalysis.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from opsd.stragglers.trace import BACKWARD, COMPUTE, DATA, FORWARD, GPU, STEP, TRANSFER, Place, Trace

_NAMES = {
    "rank": ("rank", "global_rank", "worker"),
    "step": ("step", "iteration"),
    "phase": ("phase", "optype", "op"),
    "seconds": ("seconds", "duration", "duration_s"),
    "node": ("node", "host", "hostname"),
    "gpu_index": ("gpu_index", "device", "local_rank"),
    "dp": ("dp", "dp_rank"),
    "pp": ("pp", "pp_rank", "stage"),
    "tp": ("tp", "tp_rank"),
    "cp": ("cp", "cp_rank"),
    "microbatches": ("microbatches",),
}
_PHASES = {
    FORWARD: (FORWARD, "forward-compute"),
    BACKWARD: (BACKWARD, "backward-compute"),
    COMPUTE: (COMPUTE, "batch_time"),
    DATA: (DATA, "data-loading"),
    TRANSFER: (TRANSFER,),
    GPU: (GPU,),
    STEP: (STEP + "_s", "step_time", "duration_step"),
}
_PHASE_OF = {name: phase for phase, names in _PHASES.items() for name in names}
MOST_ROWS = 20_000_000
LONGEST_S = 1e9
"""No step takes decades; sums of larger numbers could overflow."""
ENOUGH = 0.8
"""A rank counts if it has this share of the steps; a step counts if all such ranks have it."""


class TableError(Exception):
    """A table that cannot be judged; the message says why in one sentence."""


def read_table(path: Path) -> Trace:
    """The step times in the file. Raises TableError or OSError."""
    match path.suffix.lower():
        case ".parquet":
            return to_trace(_parquet(path))
        case ".json" | ".jsonl":
            return to_trace(_json(path))
        case ".csv" | ".tsv" | ".txt":
            with path.open(newline="", encoding="utf-8-sig") as file:
                lines = (line for line in file if not line.startswith("#"))
                return to_trace(
                    csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",", skipinitialspace=True)
                )
    raise TableError(f"{path.name} is no .csv, .json, .jsonl or .parquet")


def _parquet(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise TableError("Parquet needs pyarrow: pip install pyarrow, or convert the file to CSV") from None
    try:
        columns = parquet.read_table(path).to_pydict()
    except ValueError as error:  # all errors of pyarrow about content
        raise TableError(f"{path.name} is no Parquet file: {error}") from error
    return (
        {name: values[row] for name, values in columns.items()} for row in range(len(next(iter(columns.values()), ())))
    )


def _json(path: Path) -> Iterable[Mapping[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        found = (
            [json.loads(line) for line in text.splitlines() if line.strip()]
            if path.suffix == ".jsonl"
            else json.loads(text)
        )
    except (ValueError, RecursionError) as error:
        raise TableError(f"{path.name} is no JSON: {error}") from error
    if isinstance(found, dict) and all(isinstance(column, list) for column in found.values()):
        return [dict(zip(found, row, strict=False)) for row in zip(*found.values(), strict=False)]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise TableError(f"{path.name} is neither a list of objects nor an object of lists")
    return found


def to_trace(rows: Iterable[Mapping[str, Any]]) -> Trace:
    """The step times in ``rows``. Raises TableError."""
    reader = _Reader()
    for count, row in enumerate(rows):
        if count >= MOST_ROWS:
            raise TableError(f"more than {MOST_ROWS:,} rows")
        reader.add(row)
    return reader.trace()


class _Reader:
    def __init__(self) -> None:
        self._columns: dict[str, str] = {}
        self._phases: dict[str, str] = {}
        self._seconds: dict[str, dict[int, dict[int, float]]] = {}
        self._places: dict[int, Place] = {}
        self._forwards = 0
        self._microbatches: int | None = None

    def _look(self, row: Mapping[str, Any]) -> None:
        self._columns = {
            ours: next(n for n in names if n in row)
            for ours, names in _NAMES.items()
            if not row.keys().isdisjoint(names)
        }
        self._phases = {name: _PHASE_OF[name] for name in row if name in _PHASE_OF}
        long = {"phase", "seconds"} <= self._columns.keys()
        if not {"rank", "step"} <= self._columns.keys() or not (long or self._phases):
            raise TableError(
                f"the columns {', '.join(map(str, row))} do not tell rank, step and phase; expected: rank, step, and "
                "either phase and seconds or columns like forward, backward, compute, data, transfer, gpu, step_s"
            )
        if long:
            self._phases = {}

    def add(self, row: Mapping[str, Any]) -> None:
        if not self._columns:
            self._look(row)
        rank, step = self._whole(row, "rank"), self._whole(row, "step")
        if rank is None or step is None:
            raise TableError(f"a row without rank or step: {dict(row)!r:.200}")
        if rank not in self._places:
            node, gpu = row.get(self._columns.get("node", ""), ""), self._whole(row, "gpu_index")
            dp, pp, tp, cp = (self._whole(row, name) or 0 for name in ("dp", "pp", "tp", "cp"))
            self._places[rank] = Place(str(node or ""), gpu, dp, pp, tp, cp)
            self._microbatches = self._whole(row, "microbatches")
        if self._phases:
            written: dict[str, str] = {}
            for column, phase in self._phases.items():
                self._put(phase, rank, step, row.get(column), first=written.setdefault(phase, column) == column)
        else:
            phase = _PHASE_OF.get(str(row.get(self._columns["phase"])), "")
            self._forwards += phase == FORWARD
            if phase:
                self._put(phase, rank, step, row.get(self._columns["seconds"]))

    def _put(self, phase: str, rank: int, step: int, raw: Any, *, first: bool = False) -> None:
        if raw is None or raw == "":
            return
        try:
            seconds = float(raw)
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if not 0 <= seconds <= LONGEST_S:
            raise TableError(f"rank {rank} has {raw!r:.40} as its {phase} in step {step}, which is no duration")
        row = self._seconds.setdefault(phase, {}).setdefault(rank, {})
        row[step] = seconds if first else row.get(step, 0.0) + seconds

    def _whole(self, row: Mapping[str, Any], name: str) -> int | None:
        raw = row.get(self._columns.get(name, ""))
        try:
            return int(raw) if raw not in (None, "") else None
        except (TypeError, ValueError, OverflowError):
            raise TableError(f"{raw!r:.40} is no {name}") from None

    def trace(self) -> Trace:
        rows = [rows for phase, rows in self._seconds.items() if phase in (FORWARD, BACKWARD, COMPUTE, GPU, STEP)]
        if not rows:
            raise TableError("no row tells how long anything took that a rank computes")
        most = max(rows, key=lambda rows: sum(map(len, rows.values())))
        longest = max(map(len, most.values()))
        ranks = sorted(rank for rank, row in most.items() if len(row) >= ENOUGH * longest)
        steps = sorted(set.intersection(*(set(most[rank]) for rank in ranks)))
        if len(ranks) < 2 or not steps:
            raise TableError(f"{len(ranks)} ranks have steps in common; at least 2 are needed")
        seconds = {
            phase: {rank: [by_rank.get(rank, {}).get(step, 0.0) for step in steps] for rank in ranks}
            for phase, by_rank in self._seconds.items()
        }
        cells = sum(len(row) for row in self._seconds.get(FORWARD, {}).values())
        counted = round(self._forwards / cells) if self._forwards > cells else None
        return Trace(
            places={rank: self._places[rank] for rank in ranks},
            steps=steps,
            seconds=seconds,
            microbatches=self._microbatches or counted,
            left_out=sorted(self._places.keys() - set(ranks)),
        )
