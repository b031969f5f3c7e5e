"""The record of a training's last checkpoint, and whether a training goes on with the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opsd.adapters.resuming import FILE, ResumeError, chosen, data_digest, keep, known, last_saved, problems

PLAN: dict[str, Any] = {
    "planned_steps": 10, "samples_of_a_step": 8, "seeds": [42, None], "rollouts_of_a_prompt": None, "data": "a",
}  # fmt: skip


@pytest.mark.parametrize(
    ("now", "step", "skips", "said"),
    [
        ({}, 4, False, []),
        ({"planned_steps": 20}, 4, False, []),
        ({"planned_steps": 3}, 4, False, ["only 3 are planned"]),
        ({"data": "b"}, 4, False, ["twice, or never"]),
        ({"samples_of_a_step": 4}, 4, False, ["were 8 and are 4"]),
        ({"seeds": [1, None]}, 4, False, ["The seeds were"]),
        ({}, 4, True, ["ignore_data_skip"]),
        ({"data": "b", "rollouts_of_a_prompt": 8}, 4, False, ["twice, or never", "rollouts of a prompt"]),
    ],
)
def test_what_keeps_a_training_from_going_on(now: dict[str, Any], step: int, skips: bool, said: list[str]) -> None:
    """More steps may be planned; other data, batches or seeds move the place in the data."""
    found = problems(PLAN, PLAN | now, step, skips_data=skips)
    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True))


def test_a_record_for_each_output_folder(tmp_path: Path) -> None:
    """A script may train twice. If a checkpoint is gone, or the record damaged, nothing begins again in silence."""
    for name, step in (("sft", 4), ("dpo", 2), ("sft", 8)):
        folder = tmp_path / name / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text("{}")
        keep(str(tmp_path), str(tmp_path / name), step, PLAN)
    assert last_saved(str(tmp_path), str(tmp_path / "sft")) == str(tmp_path / "sft/checkpoint-8")
    record = known(str(tmp_path), str(tmp_path / "dpo"))
    assert record is not None
    assert (record["step"], record["plan"]) == (2, PLAN)
    (tmp_path / "dpo/checkpoint-2/trainer_state.json").unlink()
    with pytest.raises(ResumeError, match=r"checkpoint-2, and it is not there: put it back"):
        last_saved(str(tmp_path), str(tmp_path / "dpo"))
    assert last_saved(None, str(tmp_path / "sft")) is None
    assert last_saved(str(tmp_path), str(tmp_path / "kto")) is None
    for damaged in ("{", "[]"):
        (tmp_path / FILE).write_text(damaged)
        with pytest.raises(ResumeError, match="remove it to begin again"):
            last_saved(str(tmp_path), str(tmp_path / "sft"))
    keep(str(tmp_path), str(tmp_path / "sft"), 8, PLAN)
    assert last_saved(str(tmp_path), str(tmp_path / "sft")) == str(tmp_path / "sft/checkpoint-8")


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    """What a script asks for counts, unless a rank died while it saved that checkpoint."""
    run, output = str(tmp_path), str(tmp_path / "out")
    first, second, third = (tmp_path / f"out/checkpoint-{step}" for step in (2, 4, 12))
    assert chosen(True, run, output) is True, "transformers says that there is none"
    third.mkdir(parents=True)
    assert [chosen(given, run, output) for given in (True, str(third))] == [None, None]
    for folder in (first, second):
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
    assert [chosen(given, run, output) for given in (True, str(third))] == [str(second)] * 2
    keep(run, output, 2, PLAN)
    assert [chosen(given, run, output) for given in (True, str(third), None)] == [str(first)] * 3
    assert [chosen(given, run, output) for given in (str(second), False, "base")] == [str(second), False, "base"]


def test_a_digest_of_the_data() -> None:
    """Rows, their order and their number count, white space does not; a stream has none."""
    rows = [{"text": f"row {at}"} for at in range(600)]
    assert data_digest(rows) == data_digest([{"text": f"row  {at}"} for at in range(600)])
    assert data_digest(rows) != data_digest(rows[:-1])
    assert data_digest(rows) != data_digest(rows[::-1])
    assert data_digest(iter(rows)) is None
