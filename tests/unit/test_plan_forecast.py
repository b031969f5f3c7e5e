"""A run against its plan, and figures that a cluster has measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from opsd import exitcodes
from opsd.agent.store import open_file
from opsd.calibration.read import NotUsable, day, measured
from opsd.commands.launch_settings import plan_command
from opsd.commands.main import cli
from opsd.commands.report import report
from opsd.launch.ranks.settings import Program
from opsd.ledger.ledger import PLAN as FILE
from opsd.ledger.ledger import earlier_tokens
from opsd.plan.forecast import HABITS, BadPlan, Forecast, Planned, Progress, forecast, spares_for, told
from opsd.plan.hardware import hardware_of
from opsd.preflight.base import Verdict
from opsd.preflight.history import History
from opsd.preflight.report import Report, Value
from opsd.preflight.report import Result as CheckResult
from opsd.trainer.config import PRESETS

# A run against its plan: when it will end, what is to blame if that is later, and where both are shown.


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


# Figures that a cluster has measured take the place of a plan's defaults, and say where they are from.


H100 = hardware_of("h100")

NOW = time.time()

EVENTS = "ClusterNodes|NodeName|Start|End|State|Reason\nn[1-50]|||||\n" + "".join(
    f"|n{number}|2026-01-{number + 1:02}T00:00:00|2026-01-{number + 1:02}T12:00:00|DOWN|x\n" for number in range(1, 11)
)


def bench(tokens_per_s: float = 15_000.0, gpu: str = "NVIDIA H100 80GB HBM3", **changed: object) -> dict[str, Any]:
    """A result of make bench-gpu, of its part that a plan reads."""
    settings = {"data.micro_batch": 2, "data.batch": 8, "parallel.compile": "true", "parallel.recompute": "selective"}
    part = {"preset": "smollm3-3b", "settings": settings, "tokens_per_s": tokens_per_s, "data_share": 0.01,
            "checkpoint_stall_s": 3.0}  # fmt: skip
    return {"gpu": gpu, "date": day(NOW), "parts": {"dense_4k": part | changed}}


def node_report(node: str, at: float = NOW, gpu: str = "NVIDIA H100 80GB HBM3", scale: float = 1.0) -> Report:
    """A preflight of a node of eight GPUs, the last of which is 4 % slower and one of which is broken."""
    rates = [*[700e12 * scale] * 6, 672e12 * scale]
    burn = [Value("throughput", f"GPU {n}", rate, "flops", Verdict.PASS) for n, rate in enumerate(rates)]
    burn += [Value("throughput", "GPU 7", 90e12, "flops", Verdict.FAIL)]
    inside = [
        Value(f"{name}_busbw", f"{size} on 1 nodes", rate, "bytes_per_second", Verdict.PASS)
        for name, rates in (("all_gather", (1e9, 340e9)), ("reduce_scatter", (1e9, 320e9)))
        for size, rate in zip(("1 KiB", "8 GiB"), rates, strict=True)
    ]
    across = [
        Value("all_gather_busbw", "8 GiB on 16 nodes", 320e9, "bytes_per_second", Verdict.PASS),
        Value("reduce_scatter_busbw", "8 GiB on 16 nodes", 300e9, "bytes_per_second", Verdict.PASS),
        Value("latency", "all_reduce on 16 nodes", 220e-6, "seconds", Verdict.PASS),
    ]
    latency = Value("latency", "all_reduce on 1 nodes", 20e-6, "seconds", Verdict.PASS)
    write = Value("write", "", 2e9, "bytes_per_second", Verdict.PASS)
    results = (
        CheckResult("gpu_inventory", "", Verdict.PASS, facts={"GPUs": f"8 x {gpu}"}),
        CheckResult("gpu_burn", "", Verdict.PASS, values=tuple(burn)),
        CheckResult("collectives", "", Verdict.PASS, values=(*inside, latency)),
        CheckResult("network_collectives", "", Verdict.PASS, values=tuple(across)),
        CheckResult("storage_shared", "", Verdict.PASS, values=(write,)),
    )
    return Report(node, "standard", "0.1", at, at + 60, results)


def run(folder: Path, failures: int = 6, *, days: float = 12.0, gpus: int = 16) -> Path:
    """A run whose failures come at the same distance, each 100 s before the next step."""
    began, each = NOW - days * 86_400, days * 86_400 / (failures + 1)
    events: list[dict[str, Any]] = [{"event": "generation_started", "t": began, "generation": 1, "gpus": gpus}]
    steps: list[dict[str, Any]] = []
    for number in range(1, failures + 2):
        at = began + (number - 1) * each + (100 if number > 1 else 0)
        steps += [{"t": at + each / 2, "step": number, "generation": number, "step_s": each / 4, "evaluation_s": 864.0}]
        if number <= failures:
            at = began + number * each
            events += [
                {"event": "rank_exited", "t": at, "generation": number},
                {"event": "generation_started", "t": at + 1, "generation": number + 1, "gpus": gpus},
                {"event": "resumed", "t": at + 100, "generation": number + 1, "step": number + 1, "recovered_s": 100.0},
            ]  # fmt: skip
    events.append({"event": "finished", "t": NOW, "generation": failures + 1, "exit_code": 0})
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("events.jsonl", events), ("metrics.jsonl", steps)):
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def written(path: Path, content: object) -> Path:
    if content is None:
        open_file(path, NOW).close()
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_preflights_replace_rates(tmp_path: Path) -> None:
    """The median of the nodes, each with its newest; a GPU that failed counts for nothing."""
    history = History(tmp_path / "preflight.sqlite")
    for node, at, scale in (("n1", NOW - 9e6, 0.2), ("n1", NOW, 1.0), ("n2", NOW, 0.9)):
        history.record(node_report(node, at, scale=scale))
    found = measured([history.path], "h100", H100, HABITS, forgiving=False)
    values = {name: figure.value for name, figure in (found.hardware.figures() | found.habits.figures()).items()
              if figure.measured}  # fmt: skip
    assert values == {
        "gemm": pytest.approx(0.95 * 700e12 / 989.4e12), "spread": pytest.approx(0.04), "nvlink": 320e9,
        "node_latency": 20e-6, "network": 300e9 / 8, "network_latency": pytest.approx(50e-6), "write": 2e9,
    }  # fmt: skip
    source = "preflight, gpu_burn, median of the GPUs, 2 nodes"
    assert found.hardware.gemm[2:] == (source, True, str(history.path), day(NOW))


def test_a_benchmark_is_what_the_plan_then_predicts(tmp_path: Path) -> None:
    """Half the speed is half the share; with slower products, measured beside it, less of the time is between them."""
    speeds = {speed: written(tmp_path / f"{speed}.json", bench(1.0 * speed))
              for speed in (15_000, 7_500)}  # fmt: skip
    fast, slow = (measured([path], "h100", H100, HABITS, forgiving=False) for path in speeds.values())
    assert fast.hardware.loop.value == pytest.approx(2 * slow.hardware.loop.value, rel=0.03)
    assert (fast.habits.stall.value, fast.habits.data.value) == (3.0, pytest.approx(1 / 99))
    (tmp_path / "zzz.json").write_text(node_report("n1", scale=0.8).to_json())
    both = measured([speeds[15_000], tmp_path / "zzz.json"], "h100", H100, HABITS, forgiving=False)
    assert both.hardware.gemm.value < H100.gemm.value
    assert both.hardware.loop.value > fast.hardware.loop.value


def test_runs_replace_habits(tmp_path: Path) -> None:
    """Failures for each GPU and day, the restart, evaluations; too few events are no rate."""
    found = measured([run(tmp_path / "r")], "h100", H100, HABITS, forgiving=False).habits
    assert found.failures.value == pytest.approx(6 / (16 * 12), rel=0.05)
    assert found.restart.value == 100.0
    assert found.evaluation.measured and found.evaluation.value > 0
    few = measured([run(tmp_path / "few", failures=2)], "h100", H100, HABITS, forgiving=False).habits
    assert (few.failures, few.restart) == (HABITS.failures, HABITS.restart)


def test_slurms_events_replace_outages(tmp_path: Path) -> None:
    """Ten of half a day in the ten days of fifty nodes."""
    found = measured([written(tmp_path / "events.txt", EVENTS)], "h100", H100, HABITS, forgiving=False).habits
    assert (found.outages.value, found.repair.value) == (pytest.approx(10 / 500), 43_200)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.json", node_report("n1", NOW - 200 * 86_400).to_json(), "200 days ago, and counts for 180"),
        ("r.json", node_report("n1", NOW + 9e6).to_json(), "in the future"),
        ("r.json", node_report("n1", scale=2.0).to_json(), "gemm of 1.4"),
        ("r.json", node_report("n1", gpu="NVIDIA A100-SXM4-80GB").to_json(), "the plan is for h100"),
        ("r.json", node_report("n1", gpu="").to_json().replace('"GPU 0"', '"processor"'), "without GPUs"),
        ("r.json", '{"a": 1}', "not a preflight report"),
        ("b.json", bench(1e6), "of the GPU's peak"),
        ("b.json", bench(gpu="NVIDIA B200"), "the plan is for h100"),
        ("b.json", bench(skipped="out of memory in step 1"), "skipped, out of memory in step 1"),
        ("b.json", {"parts": {}}, "no result of make bench-gpu"),
        ("e.txt", EVENTS[: EVENTS.index("|n4")], "too few for a rate"),
        ("e.txt", "hello", "is no JSON"),
        ("journal.db", None, "no incident yet"),
        ("r.json", '{"a": ' * 100_000, "preflight report"),
    ],
    ids=count(),
)
def test_what_cannot_be_is_refused(tmp_path: Path, name: str, content: object, said: str) -> None:
    """In one sentence. A file that was only found is left out with it, or in silence if it has too little in it."""
    path = written(tmp_path / name, content)
    with pytest.raises(NotUsable, match=said):
        measured([path], "h100", H100, HABITS, forgiving=False)
    found = measured([path], "h100", H100, HABITS, forgiving=True)
    quiet = said in ("without GPUs", "too few for a rate", "no incident yet")
    assert (found.hardware, found.habits, len(found.left_out)) == (H100, HABITS, not quiet)


def test_runs_that_say_nothing_are_refused(tmp_path: Path) -> None:
    """A short one, one without GPUs, and a folder that is none."""
    for folder, said in (
        (run(tmp_path / "short", days=0.01), "shorter than an hour"),
        (run(tmp_path / "cpu", gpus=0), "without GPUs"),
        (tmp_path / "short" / "none", "cannot be read"),
    ):
        with pytest.raises(NotUsable, match=said):
            measured([folder], "h100", H100, HABITS, forgiving=False)


@pytest.mark.parametrize("name", ["pipe", "pipe.json"])
def test_a_pipe_is_refused(tmp_path: Path, name: str) -> None:
    """It is looked into more than once, and would wait for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(NotUsable, match="no file but a pipe"):
        measured([tmp_path / name], "h100", H100, HABITS, forgiving=False)


def plan(home: Path, *words: str) -> Result:
    environment = {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    return CliRunner().invoke(cli, ["plan", "tiny", "--gpus", "8", *words], env=environment)


def test_every_output_marks_what_was_measured(tmp_path: Path) -> None:
    """With its file and date, found where opsd writes it; none leaves it out, and --assume comes before it."""
    run(tmp_path / "state" / "opsd" / "runs" / "r")
    page = tmp_path / "plan.html"
    shown = plan(tmp_path, "--html", str(page))
    assert shown.exit_code == 0, shown.output
    marked = f"({tmp_path / 'state/opsd/runs'}, {day(NOW)})"
    assert "Measured on this cluster" in shown.stdout and marked in shown.stdout and marked in page.read_text()
    figure = json.loads(plan(tmp_path, "--json", "-").stdout)["figures"]["restart"]
    assert (figure["value"], figure["measured"], figure["date"]) == (100.0, True, day(NOW))
    assert "Measured" not in plan(tmp_path, "--measured", "none").stdout
    given = json.loads(plan(tmp_path, "--assume", "restart=7", "--json", "-").stdout)["figures"]["restart"]
    assert (given["value"], given["measured"]) == (7.0, False)


def test_a_measurement_that_cannot_be_used_ends_the_command(tmp_path: Path) -> None:
    """If it was asked for; one that was only found is told on stderr."""
    bad = written(tmp_path / "r.json", node_report("n1", scale=2.0).to_json())
    refused = plan(tmp_path, "--measured", str(bad))
    assert (refused.exit_code, "is impossible" in refused.stderr) == (exitcodes.USAGE, True)
    History(tmp_path / "preflight.sqlite").record(node_report("n1", scale=2.0))
    (tmp_path / "opsd.toml").write_text(f'[agent]\nstate_dir = "{tmp_path}"\n')
    found = plan(tmp_path, "--config", str(tmp_path / "opsd.toml"))
    assert (found.exit_code, "opsd: not used: " in found.stderr) == (0, True)


# A run of the included trainer has its plan in its folder from the start.


H100_LAUNCH_PLAN = "NVIDIA H100 80GB HBM3"

TRAINER = Program(
    "module", "opsd.trainer", ("--set", "parallel.tp=2", "--fresh", "--", "smollm3-3b"), "python", Path("/")
)


def proc(folder: Path, model: str) -> str:
    """A /proc with the driver's list of one GPU."""
    information = folder / "proc/driver/nvidia/gpus/0000:18:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 152\n", encoding="utf-8")
    return str(folder / "proc")


def test_the_command_keeps_a_plan_of_the_layout_that_runs(tmp_path: Path) -> None:
    """And no second one: what a run was begun with is what it is compared with. A user's modules are not imported."""
    run, root = tmp_path / "run", proc(tmp_path, H100_LAUNCH_PLAN)
    (tmp_path / "tomllib.py").write_text("raise SystemExit('of the user')", encoding="utf-8")
    words = plan_command(TRAINER, run, 384, root)
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=tmp_path, env=environ)
    kept = Planned.parse((run / FILE).read_text(encoding="utf-8"))
    assert (kept.gpus, kept.nodes) == (384, 48)
    assert plan_command(TRAINER, run, 384, root) == []


@pytest.mark.parametrize(("program", "model"), [
    (TRAINER, "NVIDIA GeForce RTX 4090"),
    (Program("script", "/home/me/train.py", ("smollm3-3b",), "python", Path("/")), H100_LAUNCH_PLAN),
    (Program("module", "torchtitan.train", (), "python", Path("/")), H100_LAUNCH_PLAN),
])  # fmt: skip
def test_nothing_is_planned_that_is_not_known(tmp_path: Path, program: Program, model: str) -> None:
    """Neither of other programs nor on other GPUs."""
    assert plan_command(program, tmp_path, 8, proc(tmp_path, model)) == []


def test_nothing_is_planned_without_a_gpu(tmp_path: Path) -> None:
    """On a CPU a plan for GPUs would be no yardstick."""
    assert plan_command(TRAINER, tmp_path, 8, str(tmp_path)) == []


def test_a_launcher_starts_without_what_reads_a_plan() -> None:
    """Pydantic takes 80 ms and 8 MiB, on every node."""
    code = "import sys, opsd.commands.launch; print('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def planned(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["plan", *words, "--measured", "none", "--json", "-"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_a_plan_as_it_is_has_one_layout() -> None:
    """That of the run, although others are faster."""
    plan = planned("smollm3-3b", "--as-is", "--gpus", "384", "--set", "parallel.tp=2")
    assert [each["layout"]["tp"] for each in plan["layouts"]] == [2]
    assert [point["gpus"] for point in plan["curve"]] == [384]
    assert plan["days"] > planned("smollm3-3b", "--gpus", "384")["days"]


@pytest.mark.parametrize(("words", "code", "said"), [
    (["smollm3-3b", "--as-is"], exitcodes.USAGE, "it needs --gpus"),
    (["smollm3-3b", "--as-is", "--gpus", "7"], exitcodes.FAILED, "the layout of the run cannot be planned: data.batch"),
])  # fmt: skip
def test_what_cannot_be_planned_as_it_is_has_a_sentence(words: list[str], code: int, said: str) -> None:
    """With what is missing."""
    result = CliRunner().invoke(cli, ["plan", *words])
    assert (result.exit_code, said in result.stderr) == (code, True), result.stderr
