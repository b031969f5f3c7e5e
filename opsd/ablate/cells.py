"""Cells: the runs of a study, one for each arm and seed. Their folders are all the state that a study has.

The name of a cell is the digest of its settings, its data and its seed. So the same study finds its cells again, and a
changed arm has new ones. ``DIR/origin.json`` records code and libraries of the first cell that began; a cell that would
begin with others is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

from opsd import durable, exitcodes, trainer
from opsd.ablate.study import (
    BASELINE,
    LOSS,
    PLACES,
    Arm,
    Cost,
    Study,
    StudyError,
    cost_of,
    digest_of,
    identity_of,
    sum_of,
)
from opsd.checkpoints import claims
from opsd.config import literal
from opsd.ledger import beside
from opsd.ledger.ledger import EVENTS, METRICS, STEPS, LedgerError, RunRecords, read_lines, read_records
from opsd.trainer.config import Config
from opsd.words import first_line, plural, printable

CELLS: Final = "cells"
SETTINGS, ORIGIN, LOCK, LOG, HELD = "cell.toml", "origin.json", "cell.lock", "cell.log", "held.jsonl"
"""In the folder of a cell, but for the origin, which all cells of a folder share."""
EVALUATIONS: Final = "evaluations.jsonl"
LARGEST: Final = 1e300
"""A result beyond it is not a number."""
LIBRARIES: Final = ("torch", "numpy", "triton", "liger-kernel", "torchao", "tokenizers")
"""What computes the losses, or decides what is computed."""
GOES_ON: Final = (exitcodes.OK, exitcodes.INTERRUPTED, exitcodes.REQUEUE, exitcodes.FENCED)
"""Codes with which an unfinished run ends that only has to be started again."""

State = Literal["new", "running", "stopped", "failed", "refused", "done"]
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """The run of an arm with a seed."""

    arm: Arm
    seed: int
    name: str
    folder: Path

    @property
    def run_name(self) -> str:
        """Of its run and its job. The same cell in another folder has others, so that both can run on one node."""
        return f"{self.name}-{digest_of(os.path.realpath(self.folder))[:6]}"

    @property
    def steps(self) -> int:
        """The steps after which it is done."""
        return self.arm.config.run.steps

    @property
    def last_tenth(self) -> range:
        """The steps whose losses count."""
        return range(self.steps - max(1, self.steps // 10) + 1, self.steps + 1)


@dataclass(frozen=True, slots=True)
class Found:
    """A cell as its folder shows it. ``losses`` are those of its steps by number, None if one was not finite.

    ``reason`` says why it failed or was refused, ``unread`` which records its cost lacks. A refused cell whose ``code``
    is 0 has ended well, and does not run again.
    """

    cell: Cell
    state: State
    code: int | None
    losses: Mapping[int, float | None]
    cost: Cost
    reason: str = ""
    unread: str = ""

    @property
    def step(self) -> int:
        """The last step that it did."""
        return max(self.losses, default=0)

    @property
    def loss(self) -> float | None:
        """The mean of the losses of as many steps as the last tenth has; None if one is missing or was not finite."""
        last = [self.losses.get(step) for step in range(self.step - len(self.cell.last_tenth) + 1, self.step + 1)]
        known = [loss for loss in last if loss is not None and math.isfinite(loss)]
        return fmean(known) if known and len(known) == len(last) else None


def cells_of(study: Study, root: Path) -> list[Cell]:
    """All cells, seed by seed, so that pairs are complete early. Raises StudyError."""
    identities = {arm.name: identity_of(arm.config) for arm in study.arms}
    found = []
    for seed in study.seeds:
        for arm in study.arms:
            identity = identities[arm.name] | {"run.seed": seed}
            if arm.name != BASELINE and identities[arm.name] == identities[BASELINE]:
                identity["copy"] = arm.name  # an A/A arm has runs of its own
            name = digest_of(identity)
            found.append(Cell(arm, seed, name, root / CELLS / name))
    return found


def others_in(root: Path, cells: Iterable[Cell]) -> int:
    """How many folders of cells below ``root`` are of other seeds or settings than ``cells``."""
    own = {cell.name for cell in cells}
    with suppress(OSError):
        return sum(path.name not in own and (path / SETTINGS).exists() for path in (root / CELLS).iterdir())
    return 0


def prepare(cell: Cell) -> None:
    """Make the folder of the cell, with the settings of its run and its places as they are now.

    Raises StudyError, OSError.
    """
    path, settings = cell.folder / SETTINGS, _settings(cell).encode()
    if path.exists() or (cell.folder / claims.FOLDER).exists():
        demand_own(cell)
        if path.read_bytes() == settings:
            return
    durable.make_folder(cell.folder)
    durable.replace(path, settings)


def demand_own(cell: Cell) -> None:
    """Raise StudyError if the settings in the cell's folder are not its own, as in a copy of another cell."""
    path = cell.folder / SETTINGS
    try:
        found = _flat(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} cannot be read: {error}; remove the folder, and the cell runs again") from error
    own = _flat(tomllib.loads(_settings(cell)))
    if differing := sorted(key for key in {*found, *own} - PLACES if found.get(key) != own.get(key)):
        raise StudyError(
            f"{path} is not of arm {cell.arm.name} with seed {cell.seed}: {', '.join(differing)} differ; remove the "
            "folder, and the cell runs again"
        )


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in raw.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


def _settings(cell: Cell) -> str:
    """The settings of the run as TOML."""
    data = cell.arm.config.data
    places = {"shards": data.shards, "fallback": data.fallback}
    changed: dict[str, dict[str, Any]] = {
        "run": {"seed": cell.seed, "folder": str(cell.folder.absolute())},
        "data": {name: str(Path(place).absolute()) for name, place in places.items() if place},
    }
    return to_toml(cell.arm.config, [f"Arm {cell.arm.name}, seed {cell.seed}."], changed)


def to_toml(config: Config, comment: Sequence[str], changed: Mapping[str, Mapping[str, Any]]) -> str:
    """The settings of a run that are not at their default, with those ``changed``; one that is None is left out."""
    sections = config.model_dump(exclude_defaults=True)
    sections["data"].pop("mixture", None)  # its stages are among the settings
    lines = [f"# {printable(line)}" for line in comment]
    for section, values in sections.items():
        told = {key: value for key, value in (values | changed.get(section, {})).items() if value is not None}
        lines += ["", f"[{section}]", *(f"{key} = {literal(value)}" for key, value in told.items())]
    return "\n".join(lines) + "\n"


def look(cell: Cell) -> Found:
    """The state of a cell. Raises StudyError, OSError."""
    if not any((cell.folder / name).exists() for name in (SETTINGS, claims.FOLDER)):
        return Found(cell, "new", None, {}, Cost())
    demand_own(cell)
    losses: dict[int, float | None] = {}
    cost, held, wrong, unread = Cost(), _held(cell.folder), "", list[str]()
    try:
        records = read_records(cell.folder)
        # The launcher's lines, which are read if there are no others, are of several steps.
        own = (line for line in records.metrics if "loss" in line and "steps" not in line)
        losses = {int(line["step"]): _finite(line["loss"]) for line in own}
        starts, ends = ([float(line["t"]) for line in held if line["event"] == event] for event in ("start", "end"))
        cost, unread = cost_of(records.events, records.metrics, starts, ends), records.unread
        wrong = _foreign(cell, records)
    except LedgerError as error:
        wrong = f"{error}; {_again(cell)}"
    newest = _newest(cell.folder)
    end = newest.end if newest is not None else None
    state = _state(cell, end)
    if newest is not None and newest.start and not newest.start.startswith(cell.name):
        wrong = f"{cell.folder / claims.FOLDER} is of {newest.start}; {_again(cell)}"
    if state == "done" and (wrong := wrong or _lost(cell, losses)):
        return Found(cell, "refused", exitcodes.OK, losses, cost, wrong)
    if state in ("new", "stopped", "failed") and held and held[-1]["event"] == "refused":
        return Found(cell, "refused", None, losses, cost, str(held[-1].get("reason")))
    code, reason = (end.code, end.reason) if end is not None else (None, "")
    if state == "done" and not cost.gpu_hours:
        unread.append("no event tells when it held its devices")
    return Found(cell, state, code, losses, cost, first_line(reason) if state == "failed" else "", "; ".join(unread))


def _again(cell: Cell) -> str:
    return f"put its own back, or remove {cell.folder}, and the cell runs again"


def _foreign(cell: Cell, records: RunRecords) -> str:
    """Why the records are not those of the cell's run, "" if they may be.

    Events name their run. Losses are told twice, by the trainer and by the launcher that reads them on the rank page.
    """
    for run in (str(event["run"]) for event in records.events if "run" in event):
        if not run.startswith(cell.name):
            return f"{EVENTS} is of run {run}; {_again(cell)}"
    told = {(line["generation"], line["step"]): _finite(line.get("loss")) for line in records.metrics}
    with suppress(OSError):
        for line in read_lines(cell.folder / STEPS, ("generation", "step", "loss")):
            loss, seen = told.get((line["generation"], line["step"])), _finite(line["loss"])
            if loss is not None and seen is not None and not math.isclose(loss, seen, rel_tol=1e-6):
                return f"{METRICS} has the loss {loss} at step {line['step']}, where {STEPS} has {seen}; {_again(cell)}"
    return ""


def _lost(cell: Cell, losses: Mapping[int, float | None]) -> str:
    """Why the losses of a run that has ended well do not tell its loss, "" if they do."""
    if missing := sum(step not in losses for step in cell.last_tenth):
        return f"{METRICS} lacks {missing} of its last {plural(len(cell.last_tenth), 'step')}; {_again(cell)}"
    if foreign := [step for step in losses if step > cell.steps]:
        return f"{METRICS} has step {min(foreign)}, and the run ends at {cell.steps}; {_again(cell)}"
    return ""


def _finite(value: object) -> float | None:
    """``value`` if it is a finite number that a mean can be made of."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < LARGEST else None


def note_held(folder: Path, event: Literal["start", "end", "refused"], t: float, reason: str = "") -> None:
    """Record that a cell got its devices at the epoch second ``t``, gave them back, or may not run. Raises OSError."""
    told = {"t": t, "event": event, "host": platform.node(), "job": os.environ.get("SLURM_JOB_ID"), "reason": reason}
    durable.append(folder / HELD, json.dumps(told).encode() + b"\n")


def _held(folder: Path) -> list[dict[str, Any]]:
    """What was noted, in the order of time."""
    with suppress(OSError):
        return list(read_lines(folder / HELD, ("t", "event")))
    return []


def is_done(folder: Path) -> bool:
    """Whether the run in the ``folder`` of a cell has ended well. Raises OSError, StudyError."""
    if not (folder / SETTINGS).exists():
        raise StudyError(f"{folder} has no {SETTINGS}: it is not the folder of a cell")
    newest = _newest(folder)
    return newest is not None and newest.end is not None and newest.end.code == exitcodes.OK


def _newest(folder: Path) -> claims.Claim | None:
    """The newest generation of the run, None if it has none."""
    return claims.newest(folder) if (folder / claims.FOLDER).is_dir() else None


def _state(cell: Cell, end: claims.End | None) -> State:
    code = end.code if end is not None else None
    if code == exitcodes.OK:
        return "done"
    if is_held(cell):
        return "running"
    return "stopped" if code is None or code in GOES_ON else "failed"


def cell_dict(found: Found) -> dict[str, Any]:
    """A cell for JSON."""
    cell = found.cell
    return {
        "cell": cell.name, "arm": cell.arm.name, "seed": cell.seed, "state": found.state, "step": found.step,
        "steps": cell.steps, "loss": found.loss, "gpu_hours": found.cost.gpu_hours, "folder": str(cell.folder),
        "reason": found.reason,
    }  # fmt: skip


def metric_of(found: Found, metric: str) -> float | None:
    """The value with which a cell ended, not a number if it failed or its losses did; None if it has not ended.

    A failed run counts against its arm: to leave it out would prefer arms that fail when they are bad.
    """
    if found.state == "failed":
        return math.nan
    if found.state != "done":
        return None
    if metric == LOSS:
        return math.nan if found.loss is None else found.loss
    value = None
    with suppress(OSError):
        for line in read_lines(found.cell.folder / EVALUATIONS, ("step", "results")):
            if line["step"] == found.cell.steps and isinstance(line["results"], dict):
                value = line["results"].get(metric, value)
    if not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < LARGEST else math.nan


def hold(cell: Cell) -> int | None:
    """A descriptor whose lock says that this process, or one that inherits it, runs the cell; None if another does.

    Raises OSError.
    """
    descriptor = os.open(cell.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_held(cell: Cell) -> bool:
    """Whether a process runs the cell on this machine."""
    try:
        descriptor = os.open(cell.folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def demand_origin(root: Path) -> dict[str, Any]:
    """The code and the libraries of all cells below ``root``: recorded by the first that begins.

    Raises StudyError if those of this process differ, OSError.
    """
    now = _origin()
    durable.make_folder(root)
    path = root / ORIGIN
    if not path.exists() and durable.create(path, json.dumps(now, indent=1).encode()):
        return now
    before = read_origin(root)
    if differences := list(_changed(before, now)):
        raise StudyError(
            f"{', '.join(differences)} differ from those that the cells in {root} have begun with; go back to them, "
            "or run the whole study again with another --dir"
        )
    return before


def read_origin(root: Path) -> dict[str, Any]:
    """What ``demand_origin`` has recorded; empty without any. Raises StudyError."""
    try:
        found = json.loads((root / ORIGIN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StudyError(
            f"{root / ORIGIN} cannot be read: {error}; remove it if all cells have the same code"
        ) from error
    return found if isinstance(found, dict) else {}


def _origin() -> dict[str, Any]:
    folder = Path(str(trainer.__file__)).resolve().parent
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.py"))}
    return {
        "libraries": {"python": platform.python_version(), **dict(_versions())},
        "commit": _git(folder, "rev-parse", "HEAD"),
        "dirty": _git(folder, "diff", "--name-only", "HEAD", "--", ".").split(),
        "files": {name: hashlib.blake2b(content, digest_size=8).hexdigest() for name, content in files.items()},
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _git(folder: Path, *words: str) -> str:
    """What git says about the checkout; "" where there is none."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _texts(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Libraries and files of the trainer that differ, by name."""
    one, other = _texts(before.get("libraries")), now["libraries"]
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield f"the library {name} ({one.get(name, 'none')}, now {other.get(name, 'none')})"
    one, other = _texts(before.get("files")), now["files"]
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"the code of the trainer ({', '.join(names[:3])}{more})"


def tell_main_run(study: Study, found: Sequence[Found], folder: Path) -> None:
    """Note in the ``folder`` of the main run what the study has cost. Raises StudyError."""
    cost = cost_of_all(found)
    told = beside.Ablation(
        str(study.path.absolute()), len(found), sum(each.state == "done" for each in found), cost.gpu_hours,
        cost.preempted, cost.recomputed, cost.failures,
    )  # fmt: skip
    try:
        beside.note(folder, told, time.time())
    except OSError as error:
        raise StudyError(f"the cost of the study is not noted in the main run {folder}: {error.strerror}") from error


def cost_of_all(found: Iterable[Found]) -> Cost:
    """Of all cells; a cell that two arms share counts once."""
    return sum_of({each.cell.name: each.cost for each in found}.values())
