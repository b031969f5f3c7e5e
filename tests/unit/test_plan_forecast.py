"""A run against its plan: when it will end, what is to blame if that is later, and where both are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from opsd.commands.main import cli
from opsd.commands.report import report
from opsd.ledger.ledger import earlier_tokens
from opsd.ledger.records import PLAN as FILE
from opsd.plan.forecast import BadPlan, Forecast, Planned, Progress, forecast, told
from opsd.plan.reliability import HABITS, spares_for
from opsd.trainer.config import PRESETS

DAY = 86_400.0
PLAN = Planned(
    made=0, gpus=384, nodes=48, tokens=1e12, days=30, training_days=27, mttf_s=5 * DAY, spares=7, outages=4.16e-3,
    repair_s=180 * 3600, clumps=3,
    overheads={"failures": 0.04, "restarts": 0.02, "checkpoints": 0.01, "maintenance": 0, "slow_days": 0.03, "data": 0,
               "evaluation": 0},
)  # fmt: skip
SHARES = {"productive": 0.93, "recomputed": 0.04, "restart": 0.02, "checkpoint_stall": 0.01}
"""Of the wall clock, as the plan has it."""


def after(days: float, tokens: float = 0.0, lost: int = 0, **more: float) -> Forecast:
    """``days`` as planned, with ``more`` days by bucket, and with ``tokens`` or as many as planned."""
    buckets = {name: share * days * DAY for name, share in SHARES.items()}
    for name, extra in more.items():
        buckets[name] = buckets.get(name, 0.0) + extra * DAY
    found = forecast(PLAN, Progress(buckets, tokens or days / 30 * 1e12, lost))
    assert found is not None
    return found


@pytest.mark.parametrize("days", [0.1, 10, 29])
def test_a_run_that_goes_as_planned_ends_as_planned(days: float) -> None:
    """At any time, and with nothing to blame."""
    found = after(days)
    assert found.days == pytest.approx(30)
    assert found.left_s == pytest.approx((30 - days) * DAY)
    assert found.ettr == pytest.approx(found.planned_ettr) == pytest.approx(0.93)
    assert found.blame == ""


@pytest.mark.parametrize(
    ("found", "blame"),
    [
        (after(10, recomputed=3), "recomputed"), (after(10, restart=3), "restart"), (after(10, other=2), "other"),
        (after(10, data_stall=2), "data_stall"), (after(10, queued=4), "queued"),
        (after(10, tokens=0.8e12 / 3), "productive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_takes_longer_is_to_blame(found: Forecast, blame: str) -> None:
    """The bucket that exceeds the plan most, once the end is a tenth later than planned."""
    assert found.excess > 0.1
    assert found.blame == blame
    assert sum(found.beyond_s.values()) == pytest.approx((found.days - 30) * DAY)


def test_what_is_past_does_not_come_again() -> None:
    """A day in the queue is a day; a day of restarts in ten is three in thirty, less what the plan says of it."""
    assert after(10, queued=1).days == pytest.approx(31)
    assert 32 < after(10, restart=1).days < 33


def test_one_failure_on_the_first_day_is_no_forecast() -> None:
    """The plan counts as much as the time in which it expects one: three hours do not become four days."""
    assert after(1, restart=1 / 8).days < 30.8
    assert after(1, restart=1 / 8).blame == ""


def test_lost_nodes_ask_for_spares() -> None:
    """Twice as many as planned for more, none for fewer."""
    expected = 48 * 20 * 4.16e-3
    few, usual, many = (after(20, lost=round(factor * expected)).spares() for factor in (0, 1, 3))
    assert few < usual < many
    assert usual == pytest.approx(spares_for(48, 0.99, HABITS), abs=1)


@pytest.mark.parametrize("days", [0.1, 2, 14])
def test_a_run_that_came_from_another_folder_ends_as_planned(days: float) -> None:
    """Half of the tokens were trained on before its ledger begins: half of the plan is left, and is what counts."""
    buckets = {name: share * days * DAY for name, share in SHARES.items()}
    found = forecast(PLAN, Progress(buckets, 0.5e12 + days / 30 * 1e12, earlier_tokens=0.5e12))
    assert found is not None
    assert found.planned_days == 15
    assert found.days == pytest.approx(15)
    assert found.left_s == pytest.approx((15 - days) * DAY)
    assert found.blame == "" and all(abs(seconds) < 1 for seconds in found.beyond_s.values())


def test_tokens_before_the_first_line_are_those_of_another_folder() -> None:
    """Whose lines may be of several steps; one that begins at the beginning has none."""
    assert earlier_tokens([{"step": 501, "tokens": 50_100}, {"step": 502, "tokens": 50_200}]) == 50_000
    assert earlier_tokens([{"step": 10, "steps": 10, "tokens": 1_000}, {"step": 1, "tokens": 100}]) == 0
    assert earlier_tokens([{"step": 7, "loss": 2.0}]) == 0


def test_a_plan_of_other_gpus_is_named() -> None:
    """The steps are slower because there are fewer GPUs, which is no fault of theirs."""
    buckets = {name: share * 10 * DAY for name, share in SHARES.items()}
    lines = [dict(told(found)) for gpus in (192, 384, 0)
             if (found := forecast(PLAN, Progress(buckets, 1e12 / 6, gpus=gpus)))]  # fmt: skip
    assert ["GPUs" in line for line in lines] == [True, False, False]
    assert "192, and the plan is of 384" in lines[0]["GPUs"]


def test_no_forecast_without_steps_or_with_all_of_them() -> None:
    """Nothing is told in place of what is not known."""
    assert forecast(PLAN, Progress({"productive": 0.0, "setup": 60.0}, 0)) is None
    assert forecast(PLAN, Progress({"productive": 60.0}, 1e12)) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "all of it"), ("{}", "made: Field required"), (PLAN.model_dump_json()[:-1] + ', "days": -1}', "days"),
        (PLAN.model_copy(update={"overheads": {"failures": 1.0}}).model_dump_json(), "no time for training"),
        (PLAN.model_copy(update={"repair_s": 360 * DAY}).model_dump_json(), "too few nodes"),
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(text: str, said: str) -> None:
    """With where it is wrong and how to write it again."""
    with pytest.raises(BadPlan, match=f"{said}.*opsd plan --run"):
        Planned.parse(text)


def a_run(folder: Path, tokens: float = 1e11) -> None:
    """Four days, one of them lost to a restart."""
    lines: list[dict[str, Any]] = [
        {"event": "generation_started", "t": 0, "generation": 1, "gpus": 384, "nodes": ["n1"]},
        {"event": "node_lost", "t": 3 * DAY, "generation": 1, "node": "n1"},
        {"event": "generation_started", "t": 3 * DAY + 1, "generation": 2, "gpus": 384, "nodes": ["n1"]},
    ]
    steps = [{"t": at * DAY, "step": at, "generation": 1 + (at == 4), "step_s": DAY / (1 + (at == 4) * 10),
              "tokens": round(tokens / 4 * at)} for at in range(1, 5)]  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))


def test_the_report_shows_plan_and_forecast(tmp_path: Path) -> None:
    """In text, page and JSON; a plan that cannot be read is said, and a run that is done has taken its days."""
    a_run(tmp_path)
    (tmp_path / FILE).write_text(PLAN.model_dump_json())
    text = CliRunner().invoke(report, [str(tmp_path), "--text"]).stdout
    assert "planned" in text and "beyond the plan: " in text and "most of it by restart" in text
    found = json.loads(CliRunner().invoke(report, [str(tmp_path), "--json"]).stdout)["forecast"]
    assert (found["blame"], found["planned_days"]) == ("restart", 30)
    page = CliRunner().invoke(report, [str(tmp_path), "--out", "-"]).stdout
    assert "Plan and forecast" in page and "days left" in page
    (tmp_path / FILE).write_text("{")
    assert "write it again with opsd plan --run" in CliRunner().invoke(report, [str(tmp_path), "--text"]).stdout
    (tmp_path / FILE).write_text(PLAN.model_dump_json())
    a_run(tmp_path, tokens=1e12)
    assert "4.0 days; 30.0 were planned" in CliRunner().invoke(report, [str(tmp_path), "--text"]).stdout


def test_a_plan_is_kept_for_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder that is named, or in run.folder when the layout is written."""
    monkeypatch.chdir(tmp_path)
    tiny = (PRESETS / "tiny.toml").read_text()
    Path("run.toml").write_text(re.sub(r"\[run\]\n", '[run]\nfolder = "here"\n', tiny))
    command = ["plan", "run.toml", "--gpus", "8", "--measured", "none"]
    for more, folder in ((["--run", "r"], "r"), (["--write"], "here")):
        assert CliRunner().invoke(cli, [*command, *more]).exit_code == 0
        assert Planned.parse(Path(folder, FILE).read_text()).gpus == 8
