"""Figures that a cluster has measured take the place of a plan's defaults, and say where they are from."""

from __future__ import annotations

import json
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from opsd import exitcodes
from opsd.agent.store import open_file
from opsd.calibration.evidence import NotUsable, day
from opsd.calibration.read import measured
from opsd.commands.main import cli
from opsd.plan.hardware import hardware_of
from opsd.plan.reliability import HABITS
from opsd.preflight.base import Verdict
from opsd.preflight.history import History
from opsd.preflight.report import Report, Value
from opsd.preflight.report import Result as CheckResult

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


def report(node: str, at: float = NOW, gpu: str = "NVIDIA H100 80GB HBM3", scale: float = 1.0) -> Report:
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
        history.record(report(node, at, scale=scale))
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
    (tmp_path / "zzz.json").write_text(report("n1", scale=0.8).to_json())
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
        ("r.json", report("n1", NOW - 200 * 86_400).to_json(), "200 days ago, and counts for 180"),
        ("r.json", report("n1", NOW + 9e6).to_json(), "in the future"),
        ("r.json", report("n1", scale=2.0).to_json(), "gemm of 1.4"),
        ("r.json", report("n1", gpu="NVIDIA A100-SXM4-80GB").to_json(), "the plan is for h100"),
        ("r.json", report("n1", gpu="").to_json().replace('"GPU 0"', '"processor"'), "without GPUs"),
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
    bad = written(tmp_path / "r.json", report("n1", scale=2.0).to_json())
    refused = plan(tmp_path, "--measured", str(bad))
    assert (refused.exit_code, "is impossible" in refused.stderr) == (exitcodes.USAGE, True)
    History(tmp_path / "preflight.sqlite").record(report("n1", scale=2.0))
    (tmp_path / "opsd.toml").write_text(f'[agent]\nstate_dir = "{tmp_path}"\n')
    found = plan(tmp_path, "--config", str(tmp_path / "opsd.toml"))
    assert (found.exit_code, "opsd: not used: " in found.stderr) == (0, True)
