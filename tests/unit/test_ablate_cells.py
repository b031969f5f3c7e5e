"""Cells of a study: their names, their settings, what their folders say, and whose code they run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from opsd.ablate.cells import (
    ORIGIN,
    SETTINGS,
    cells_of,
    cost_of_all,
    demand_origin,
    hold,
    is_done,
    look,
    metric_of,
    note_held,
    prepare,
)  # fmt: skip
from opsd.ablate.study import StudyError, identity_of, read_study
from opsd.trainer.config import load
from tests.fakes.studies import ARM, STEPS, end_cell, make_study, study_and_cells


def test_a_cell_is_named_by_its_settings_and_its_seed(tmp_path: Path) -> None:
    """Cells come seed by seed; other seeds, arms and order of arms leave the names of the rest as they are."""
    _, cells = study_and_cells(make_study(tmp_path))
    assert [(cell.arm.name, cell.seed) for cell in cells[:3]] == [("baseline", 1), ("lr", 1), ("baseline", 2)]
    assert len({cell.name for cell in cells}) == 6
    more = make_study(tmp_path, '[arm.tied]\nset = ["model.tied=false"]\n' + ARM.replace("arm.lr", "arm.rate"))
    assert {cell.name for cell in cells} < {cell.name for cell in cells_of(read_study(more), tmp_path)}


def test_an_arm_without_a_change_has_runs_of_its_own(tmp_path: Path) -> None:
    """An A/A arm that shared the baseline's runs would show no noise."""
    _, cells = study_and_cells(make_study(tmp_path, "[arm.same]\n"))
    assert len({cell.name for cell in cells}) == 6


def test_the_settings_of_a_cell_stand_by_themselves(tmp_path: Path) -> None:
    """The trainer reads the same settings from the cell's file, with absolute places, the seed and its folder."""
    _, cells = study_and_cells(make_study(tmp_path, ARM.replace("1e-3", "1e-5")))
    prepare(cells[3])
    config = load(str(cells[3].folder / SETTINGS), (), {})
    assert identity_of(config) == identity_of(cells[3].arm.config) | {"run.seed": 2}
    assert (config.run.folder, config.optimizer.lr) == (str(cells[3].folder.absolute()), 1e-5)


def test_stages_of_a_mixture_survive(tmp_path: Path) -> None:
    """They are in the settings, and the file of the mixture is not read again."""
    (tmp_path / "mix.toml").write_text("[[stages]]\nstart = 1\nweights = {shards = 1.0}\n")
    arm = f'[arm.mix]\nset = ["data.shards={tmp_path}", "data.mixture={tmp_path}/mix.toml"]\n'
    _, cells = study_and_cells(make_study(tmp_path, arm))
    prepare(cells[1])
    (tmp_path / "mix.toml").unlink()
    assert load(str(cells[1].folder / SETTINGS), (), {}).data.stages == cells[1].arm.config.data.stages


@pytest.mark.parametrize(
    ("steps", "code", "state"),
    [
        (STEPS, 0, "done"), (7, 0, "refused"), (7, 3, "stopped"), (7, 75, "stopped"), (7, None, "stopped"),
        (STEPS, None, "stopped"), (7, 1, "failed"), (0, 70, "failed"), (STEPS, 1, "failed"),
    ],
)  # fmt: skip
def test_the_state_of_a_cell(tmp_path: Path, steps: int, code: int | None, state: str) -> None:
    """Done is a run that ended well, with all its losses; one that ended in good order or was killed goes on."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    assert look(cell).state == "new"
    end_cell(cell, steps=steps, code=code)
    assert (look(cell).state, look(cell).step) == (state, steps)


def test_one_process_runs_a_cell(tmp_path: Path) -> None:
    """Its lock holds until the last process that has it ends."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    prepare(cell)
    lock = hold(cell)
    assert lock is not None
    assert look(cell).state == "running"
    assert hold(cell) is None
    os.close(lock)
    assert look(cell).state == "stopped"


def test_the_loss_is_the_mean_of_the_last_tenth(tmp_path: Path) -> None:
    """A step that was done again counts once, with its last line."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    end_cell(cell, 3.0)
    with (cell.folder / "metrics.jsonl").open("a") as file:
        for step, loss in ((19, 2.0), (20, 1.0)):
            file.write(
                json.dumps({"t": 1100 + step, "generation": 2, "step": step, "step_s": 1.0, "loss": loss}) + "\n"
            )
    assert metric_of(look(cell), "loss") == 1.5


def test_a_run_that_fails_or_diverges_has_no_number(tmp_path: Path) -> None:
    """It counts against its arm; a run that has not ended counts not at all."""
    _, cells = study_and_cells(make_study(tmp_path))
    end_cell(cells[0], None)
    end_cell(cells[1], 3.0, steps=5, code=1)
    end_cell(cells[2], 3.0, steps=5, code=75)
    found = [metric_of(look(cell), "loss") for cell in cells[:4]]
    assert [value if value is None else math.isnan(value) for value in found] == [True, True, None, None]


def test_an_evaluation_of_the_last_step_is_the_metric(tmp_path: Path) -> None:
    """Earlier checkpoints do not count, the newest line does."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    end_cell(cell)
    lines = [(10, {"arc_accuracy": 0.1}), (STEPS, {}), (STEPS, {"arc_accuracy": 0.4}), (STEPS, {"web_loss": 3.0})]
    told = [json.dumps({"step": step, "results": results}) + "\n" for step, results in lines]
    (cell.folder / "evaluations.jsonl").write_text("".join(told))
    assert metric_of(look(cell), "arc_accuracy") == 0.4
    assert metric_of(look(cell), "other") is None


def test_hours_are_those_of_all_gpus(tmp_path: Path) -> None:
    """10 s of setup and 20 steps of a second on 2 GPUs are a GPU-minute; nothing of it was lost."""
    _, cells = study_and_cells(make_study(tmp_path))
    end_cell(cells[0])
    end_cell(cells[1], gpus=4)
    assert cost_of_all([look(cell) for cell in cells]).gpu_hours == pytest.approx(3 / 60)
    assert look(cells[0]).cost.lost == 0


def test_a_cell_may_move_between_nodes_of_different_size(tmp_path: Path) -> None:
    """Here 25 s on 2 GPUs, an hour in the queue, and 35 s on 8, of which ten steps are done again."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    end_cell(cell, steps=10, code=None)
    events, metrics = (cell.folder / "events.jsonl").read_text(), (cell.folder / "metrics.jsonl").read_text()
    end_cell(cell, began=4630.0, gpus=8)
    for name, before in (("events", events), ("metrics", metrics)):
        path = cell.folder / f"{name}.jsonl"
        path.write_text(before + path.read_text().replace('"generation": 1', '"generation": 2'))
    for t in (995.0, 4625.0):
        note_held(cell.folder, "start", t)
    cost = look(cell).cost
    assert cost.gpu_hours == pytest.approx((25 * 2 + 35 * 8) / 3600)
    assert cost.preempted == pytest.approx((5 + 10) * 8 / 3600)
    assert cost.recomputed == pytest.approx(10 * 8 / 3600)
    assert cost.failures == 0 and cost.lost < cost.gpu_hours


def test_a_cell_that_is_done_does_not_run_again(tmp_path: Path) -> None:
    """Not even as a second job, which a submitter that died may have left."""
    _, (cell, other, *_) = study_and_cells(make_study(tmp_path))
    end_cell(cell)
    end_cell(other, steps=5, code=75)
    assert is_done(cell.folder) and not is_done(other.folder)
    (other.folder / SETTINGS).unlink()
    with pytest.raises(StudyError, match="not the folder of a cell"):
        is_done(other.folder)


def test_other_code_and_libraries_are_refused_by_name(tmp_path: Path) -> None:
    """The first cell records those of all."""
    first = demand_origin(tmp_path / "dir")
    assert demand_origin(tmp_path / "dir") == first
    assert {"python", "torch"} <= first["libraries"].keys() and "train.py" in first["files"]
    other = first | {"libraries": first["libraries"] | {"torch": "1.0"}, "files": first["files"] | {"train.py": "0"}}
    (tmp_path / "dir" / ORIGIN).write_text(json.dumps(other))
    with pytest.raises(StudyError, match=r"the library torch \(1\.0, now .*the code of the trainer \(train\.py\)"):
        demand_origin(tmp_path / "dir")
