"""Reads what a cluster has measured, wherever opsd writes it, and puts it in the place of a plan's defaults."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from opsd.calibration import bench, outages, preflights, runs
from opsd.calibration.evidence import Evidence, NotUsable, TooLittle, checked, figures
from opsd.ledger.records import EVENTS, METRICS
from opsd.plan.forecast import Habits
from opsd.plan.hardware import Hardware
from opsd.preflight.command import HISTORY
from opsd.report.run import RunReport

_JOURNAL: Final = "journal.db"
_LARGEST: Final = 256 << 20
"""Bytes of the metrics of a run that is read among others; one that is named is read whatever its size."""
_SQLITE: Final = b"SQLite format 3\x00"


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan's figures with those of this cluster among them, and in a sentence each what was left out."""

    hardware: Hardware
    habits: Habits
    left_out: tuple[str, ...] = ()


def usual_places(state_dir: Path, runs_root: Path) -> Iterator[Path]:
    """Files that opsd has written here: preflights and journal of this node, runs of this user. Those that exist."""
    yield from filter(Path.exists, (state_dir / HISTORY, state_dir / _JOURNAL))
    if any(runs_root.glob(f"*/{EVENTS}")):
        yield runs_root


def measured(
    paths: Sequence[Path], gpu: str, hardware: Hardware, habits: Habits, *, forgiving: bool, now: float | None = None
) -> Measured:
    """The figures of ``paths`` in place of others.

    Raises NotUsable, unless ``forgiving``. A file is left out then, and nothing is said of one with too little in it.
    """
    when = time.time() if now is None else now
    left_out: list[str] = []
    for path in sorted(paths, key=_kind):
        try:
            known = hardware.figures() | habits.figures()
            found = figures(checked(_evidence(path, gpu, hardware), known, when), known)
        except NotUsable as error:
            if not forgiving:
                raise
            if not isinstance(error, TooLittle):
                left_out.append(str(error))
            continue
        hardware, habits = hardware.given(found), habits.given(found)
    return Measured(hardware, habits, tuple(left_out))


def _kind(path: Path) -> int:
    """Preflights come first: what a step loses beside its kernels is fitted to a benchmark with them."""
    return 1 if path.suffix == ".json" and path.is_file() and "parts" in _json(path) else 0


def _evidence(path: Path, gpu: str, hardware: Hardware) -> Iterable[Evidence]:
    """What ``path`` says. Raises NotUsable."""
    if path.is_dir():
        return _of_folder(path)
    if path.exists() and not path.is_file():
        raise NotUsable(f"{path} is no file but a pipe or a device: write what it says into a file, and give that")
    try:
        with path.open("rb") as file:
            head = file.read(len(_SQLITE))
        if head == _SQLITE:
            return _of_database(path, gpu, hardware)
        if not head.lstrip().startswith(b"{"):
            return outages.figures_of(path, _age(path))
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotUsable(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from error
    if "parts" in (told := _json(path)):
        return bench.figures_of(path, told, gpu, hardware)
    return preflights.figures_of(preflights.of_report(path, text), path, gpu, hardware)


def _of_folder(path: Path) -> Iterable[Evidence]:
    if (path / EVENTS).exists():
        return runs.figures_of([runs.read(path)], path)
    if folders := sorted(path.glob(f"*/{EVENTS}")):
        return runs.figures_of(list(_long(folder.parent for folder in folders)), path)
    if next(path.rglob(_JOURNAL), None):
        return outages.figures_of(path, max(map(_age, path.rglob(_JOURNAL))))
    raise NotUsable(f"{path} has neither runs nor journals: give what preflight, runs or agents have written")


def _of_database(path: Path, gpu: str, hardware: Hardware) -> Iterable[Evidence]:
    if path.name == _JOURNAL or "incidents" in _tables(path):
        return outages.figures_of(path, _age(path))
    return preflights.figures_of(preflights.of_history(path), path, gpu, hardware)


def _long(folders: Iterable[Path]) -> Iterator[RunReport]:
    """Those runs that say anything; the others of a user are trials. Reading the largest would take minutes."""
    for folder in folders:
        metrics = folder / METRICS
        if metrics.exists() and metrics.stat().st_size > _LARGEST:
            continue
        with suppress(NotUsable):
            yield runs.read(folder)


def _tables(path: Path) -> set[str]:
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        finally:
            database.close()
    except sqlite3.Error as error:
        raise NotUsable(f"{path} is neither a history of preflights nor a journal: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _age(path: Path) -> float:
    """When the file was written last, in epoch seconds."""
    return path.stat().st_mtime
