"""Small studies whose cells ended as a test wants.

Small studies, and cells that ended as a test wants without having run.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from opsd.ablate.cells import Cell, cells_of, look, prepare
from opsd.ablate.report import Report, make_report
from opsd.ablate.study import Study, read_study
from opsd.checkpoints import claims
from opsd.checkpoints.claims import Claim
from tests.fakes.posttrain import make_corpus

STEPS = 20
STUDY = f"""
baseline = "tiny"
seeds = 3
set = [
    "data.shards=SHARDS", "run.steps={STEPS}",
    "schedule.warmup=2", "schedule.decay_start=10", "schedule.decay_end=20",
]
"""
ARM = '[arm.lr]\nset = ["optimizer.lr=1e-3"]\n'


def make_study(folder: Path, arms: str = ARM, head: str = "") -> Path:
    """A study file in ``folder``, beside its corpus; ``head`` comes before the arms."""
    if not (folder / "shards").exists():
        make_corpus(folder / "shards")
    path = folder / "study.toml"
    path.write_text(STUDY.replace("SHARDS", str(folder / "shards")) + head + "\n" + arms)
    return path


def study_and_cells(path: Path) -> tuple[Study, list[Cell]]:
    """The study of a file and its cells, in the folder that the command takes by default."""
    study = read_study(path)
    return study, cells_of(study, path.with_suffix(""))


def end_cell(
    cell: Cell,
    loss: float | None = 3.0,
    *,
    steps: int = STEPS,
    code: int | None = 0,
    began: float = 1000.0,
    gpus: int = 2,
) -> None:
    """Leave what a run leaves that made ``steps`` of a second and ended with ``code``, None if it was killed."""
    prepare(cell)
    events: list[dict[str, object]] = [
        {"t": began, "event": "generation_started", "generation": 1, "world_size": gpus, "gpus": gpus}
    ]
    lines = [
        {"t": began + 10 + step, "generation": 1, "step": step, "step_s": 1.0, "loss": loss, "tokens": 1024 * step}
        for step in range(1, steps + 1)
    ]
    if code is not None:
        events.append({"t": began + 10 + steps, "event": "finished", "generation": 1, "exit_code": code, "reason": ""})
        claims.create(
            cell.folder,
            Claim(
                claims.newest_number(cell.folder) + 1, f"{cell.run_name}, n1-1-0", "n1-1-0",
                plan={"end": {"code": code, "reason": "told"}},
            ),
        )  # fmt: skip
    events = [event | {"run": cell.run_name} for event in events]
    seen = [line | {"steps": steps} for line in lines[-1:] if loss is not None]
    logs = (("events.jsonl", events), ("metrics.jsonl", lines), ("steps.jsonl", seen))
    for name, records in logs:
        (cell.folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def large_report(folder: Path, arms: int = 100, seeds: int = 4) -> Report:
    """The report of many arms, of which one has not begun, one is far off, and some have a name as long as allowed."""
    told = "".join(
        f"[arm.{f'arm-{number:02d}':{'-' if number % 9 == 0 else ''}<{63 if number % 9 == 0 else 0}}]\n"
        f'set = ["optimizer.lr={1.1e-3 + number * 1e-5:.5f}"]\n'
        for number in range(arms)
    )
    path = make_study(folder, told, "margin = 0.02")
    path.write_text(path.read_text().replace("seeds = 3", f"seeds = {seeds}"))
    study, cells = study_and_cells(path)
    rng = Random(37)
    for cell in cells:
        number = int(cell.arm.name[4:6]) if cell.arm.name != "baseline" else None
        effect = {None: 0.0, 4: 5.0}.get(number, (-0.3, 0.0, 0.2, 0.0)[(number or 0) % 4])
        if number != 2:
            end_cell(cell, 3 + effect + 0.1 * cell.seed + rng.gauss(0, 0.01))
    return make_report(study, [look(cell) for cell in cells], path.with_suffix(""))
