"""The report of a run, from what launcher and trainer leave in its folder."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.commands.compare import compare
from opsd.commands.ledger import ledger
from opsd.commands.report import report
from opsd.report.page import compare_page, compare_text, losses_part, report_page
from opsd.report.run import PAGE, NoReport, Price, cost_line, read_run
from opsd.report.text import closing_block, text_report
from opsd.words import count, duration, reason

T = 1_795_000_000.0


def event(t: float, kind: str, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return {"t": T + t, "event": kind, "generation": generation, "run": "r", "node": "n1", **fields}


def step(t: float, number: int, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return {"t": T + t, "generation": generation, "step": number, "step_s": 1.0, "tokens": number * 100, **fields}


EVENTS = [
    event(0, "generation_started", world_size=16, nodes=["n1", "n2"], gpus=16),
    event(6, "checkpoint_committed", step=4),
    event(9.5, "rank_exited", rank=3, exit="exit code 1", step=6, culprit=True,
          error={"type": "RuntimeError", "message": "boom", "where": "t.py:1"}),
    event(9.6, "rank_exited", rank=4, exit="signal SIGABRT", step=6, culprit=False),
    event(10, "generation_started", 2, world_size=16, nodes=["n1", "n3"], gpus=16),
    event(13, "resumed", 2, step=5, previous_step=6, lost_steps=2, recovered_s=2.5),
    event(20, "finished", 2, exit_code=0, reason="all ranks finished"),
]  # fmt: skip
STEPS = [step(2 + n, n, loss=5 - 0.1 * n) for n in range(1, 7)] + [step(9 + n, n, 2, loss=4.0) for n in range(5, 11)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, EVENTS, STEPS)
    return tmp_path


def write(folder: Path, events: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in events) + '{"torn')
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in steps))


def test_a_restart_has_one_cause_and_its_cost(folder: Path) -> None:
    """Ranks that die with the first are no causes; the cost is the time without steps and that of repeated steps."""
    run = read_run(folder)
    assert [(r.cause, r.step, r.repeated) for r in run.restarts] == [
        ("rank 3 on n1 failed after step 6: RuntimeError: boom", 5, 2)
    ]
    assert run.restarts[0].cost_s == pytest.approx(2.5 + 2 * 1.0)
    assert (run.state, run.tokens, run.last_step, run.repeated) == ("finished", 1000, 10, 2)
    assert run.nodes == ("n1", "n3")


def test_closing_block(folder: Path) -> None:
    """Why it ended, steps, tokens, time, restarts with cause and cost; no resume command after success."""
    lines = closing_block(read_run(folder), Price(2.0, "EUR"), page=Path("/r/report.html"), resume="opsd launch x")
    assert lines[0] == "r finished"
    assert "  steps     12, 2 of them a second time; the last is step 10" in lines
    assert "  tokens    1,000" in lines
    assert any(line.startswith("  time      20.0 s, ETTR ") for line in lines)
    assert "  restarts  1, which cost 4.5 s" in lines
    assert any(line.endswith("went on with step 5 after 2.5 s, 2 steps done again") for line in lines)
    assert "  report    /r/report.html" in lines
    assert not any("opsd launch x" in line for line in lines)


def test_a_failed_run_says_how_to_go_on(folder: Path) -> None:
    """The first sentence of the reason and the command; the rest has been said before."""
    end = event(20, "finished", 2, exit_code=70, reason="stopped: it failed twice. Rank 3 …\n   log")
    write(folder, [*EVENTS[:-1], end], STEPS)
    lines = closing_block(read_run(folder), Price(), page=None, resume="opsd launch x")
    assert lines[0] == "r failed: the same failure came back: it failed twice"
    assert lines[-1] == "  resume    opsd launch x"


def test_cost_is_of_the_gpus_and_leaves_the_queue_out(folder: Path) -> None:
    """GPU-hours count the time in which the run held its GPUs; money appears only with a price."""
    queued = [event(3620, "generation_started", 3, world_size=16, gpus=16), event(3630, "finished", 3, exit_code=0)]
    write(folder, [*EVENTS, *queued], STEPS)
    run = read_run(folder)
    assert run.gpu_hours == pytest.approx(16 * 30 / 3600, rel=1e-6)
    assert cost_line(run, Price()).startswith("0.13 GPU-hours; failures cost 0.0")
    assert "0.27 EUR" in cost_line(run, Price(2.0, "EUR"))


def test_a_requeue_for_a_lost_node_is_a_restart(folder: Path) -> None:
    """A stop in good order is none."""
    lost = event(19, "node_lost", 2, lost="n3", silent_s=2.0, ranks=True)
    ends = [event(20, "finished", 2, exit_code=75, reason="too few"), event(60, "generation_started", 3, world_size=8)]
    write(folder, [*EVENTS[:-1], lost, *ends], STEPS)
    assert [restart.kind for restart in read_run(folder).restarts] == ["rank_exited", "node_lost"]
    write(folder, [*EVENTS[:-1], event(19, "stopped", 2, signal="SIGUSR1", step=6), *ends], STEPS)
    assert [restart.kind for restart in read_run(folder).restarts] == ["rank_exited"]


def test_a_run_without_gpus_has_no_cost(folder: Path) -> None:
    """Nothing is said in place of what is not known."""
    write(folder, [{**e, "gpus": 0} for e in EVENTS], STEPS)
    assert cost_line(read_run(folder), Price(2.0)) == ""


def test_a_run_that_still_runs(folder: Path) -> None:
    """Without an end there is a report all the same, and none of what an earlier start ended with."""
    write(folder, [*EVENTS, event(30, "generation_started", 3)], STEPS)
    run = read_run(folder)
    assert run.exit_code is None and text_report(run, Price())[0] == "r has not ended"


def test_no_report_of_what_is_no_run(tmp_path: Path) -> None:
    """The sentence names the folder, or says that the run never began."""
    with pytest.raises(NoReport, match="not a run folder"):
        read_run(tmp_path)
    write(tmp_path, [event(0, "finished", exit_code=1)], [])
    with pytest.raises(NoReport, match="never began"):
        read_run(tmp_path)


@pytest.mark.parametrize("command", [(report, "no-such"), (compare, "no-such", "no-such"), (ledger, "no-such")])
def test_a_run_that_does_not_exist_is_a_wrong_command_line(command: tuple[click.Command, str], tmp_path: Path) -> None:
    """All commands that take a run say it in the same words, with the same code."""
    told = CliRunner(env={"XDG_STATE_HOME": str(tmp_path)}).invoke(command[0], command[1:])
    assert (told.exit_code, told.stderr.partition(":")[0]) == (exitcodes.USAGE, "opsd")
    assert "there is no run no-such: neither a folder of that name nor one in" in told.stderr


def test_reasons_have_no_numbers() -> None:
    """Those of the operating system are for programs; libraries put them into texts."""
    assert reason(ConnectionRefusedError(111, "Connection refused")) == "Connection refused"
    assert reason(RuntimeError("[Errno -2] Name or service not known")) == "Name or service not known"
    assert reason(FileNotFoundError(2, "No such file or directory", "/x")) == "No such file or directory"
    assert reason(TimeoutError()) == "TimeoutError"


def test_words() -> None:
    """Two units at most; large counts are shortened."""
    seconds = (0.84, 12.34, 59.96, 245, 11_520, 187_200, 3600)
    assert [duration(s) for s in seconds] == ["0.84 s", "12.3 s", "1 min", "4 min 5 s", "3 h 12 min", "2 d 4 h", "1 h"]
    assert [count(n) for n in (250_000, 12_400_000, 3.21e9, 1.05e12)] == ["250,000", "12.4 M", "3.21 B", "1.05 T"]


def test_page_is_one_file_without_scripts(folder: Path) -> None:
    """Nothing is loaded from elsewhere, names of users are escaped, and the charts show loss and throughput."""
    lines = [{**line, "tokens_per_s": 100.0} for line in STEPS]
    write(folder, [{**e, "run": "<b>&"} for e in EVENTS], lines)
    page = report_page(read_run(folder), Price(2.0))
    assert page.count('<svg xmlns="http://www.w3.org/2000/svg" class="chart"') == 2
    assert "<script" not in page and "<b>&" not in page and "&lt;b&gt;&amp;" in page
    assert not re.findall(r"(?:src|href|url)\s*[=(]", page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "restarts are shaded" in page and "rank 3 on n1 failed" in page


def test_comparison_says_where_losses_part(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Equal runs are equal to the last digit; otherwise the first step that differs is named."""
    other = tmp_path_factory.mktemp("other")
    write(other, EVENTS, [{**line, "loss": line["loss"] + (1e-12 if line["step"] >= 9 else 0)} for line in STEPS])
    first, second = read_run(folder), read_run(other)
    assert "equal to the last digit in all 10 steps" in losses_part(first, first)
    assert "differ from step 9 on" in losses_part(first, second)
    assert compare_page(first, second, Price()).count('class="chart"') == 2
    assert compare_text(first, second, Price())[0].split() == ["r", "r"]


def test_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page, text and JSON of a run by folder or by name; one sentence for a run that is not there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("OPSD_CONFIG", os.devnull)
    (folder / "state/opsd/runs").mkdir(parents=True)
    (folder / "state/opsd/runs/mine").symlink_to(folder)
    run = CliRunner().invoke
    assert run(report, [str(folder)]).output.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert run(report, ["mine", "--text"]).output.startswith("r finished\n")
    assert json.loads(run(report, ["--json"]).output)["restarts"][0]["repeated"] == 2
    assert "equal to the last digit" in run(compare, ["mine", str(folder)]).output
    assert "there is no run other" in run(report, ["other"]).output


def test_tokens_of_other_programs_count_once(tmp_path: Path) -> None:
    """steps.jsonl has those of each line; what was done again is trained on once."""
    lines = [step(5, 6, steps=6, new_tokens=600), step(12, 8, 2, steps=4, new_tokens=400, loss=2.5)]
    for line in lines:
        del line["tokens"]
    write(tmp_path, EVENTS, [])
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert (run.repeated, run.tokens) == (2, 800)
    assert "  tokens    800" in closing_block(run, Price(), page=None, resume="")


def test_loads_of_experts(folder: Path) -> None:
    """The newest whole line is on the page by layer, in the text as a sentence, and complete as JSON."""
    assert "experts" not in report_page(read_run(folder), Price()) and read_run(folder).as_dict()["experts"] is None
    line = {"t": T, "generation": 1, "step": 200, "steps": 100, "first_layer": 1, "loads": [[10, 10], [39, 1]]}
    older = line | {"step": 100, "loads": [[1, 1], [1, 1]]}
    (folder / "experts.jsonl").write_text(f"{json.dumps(older)}\n{json.dumps(line)}\n" + '{"t": 1, "lo')
    run = read_run(folder)
    said = "fullest is expert 0 of layer 2, 1.9 times the mean; 1 of 4 have less than 10% of it (steps 101 to 200)"
    assert any(said in text for text in text_report(run, Price()))
    assert "0 (1.95 x mean)" in report_page(run, Price())
    assert run.as_dict()["experts"] == {"step": 200, "steps": 100, "loads": {1: [10, 10], 2: [39, 1]}}


def test_an_evaluation_that_failed_says_why(folder: Path) -> None:
    """Nothing after the step would be read as nothing to tell."""
    line = {"t": 9.0, "step": 31, "results": {}, "why": "/sets/a.jsonl cannot be read"}
    (folder / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    told = "step 31: failed: /sets/a.jsonl cannot be read"
    assert any(told in text for text in text_report(read_run(folder), Price()))


def test_pipes_in_place_of_a_runs_files_hold_nothing_up(folder: Path) -> None:
    """Nobody writes into them or reads from them. One in the place of the report is replaced by it."""
    for name in ("plan.json", "experts.jsonl", "evaluations.jsonl", PAGE):
        os.mkfifo(folder / name)
    assert read_run(folder).plan_problem == "plan.json cannot be read: not a regular file"
    assert CliRunner().invoke(report, [str(folder)]).output == f"{folder / PAGE}\n"
    assert (folder / PAGE).read_text().startswith("<!doctype html>")


def test_a_link_to_a_device_is_replaced_by_the_report(folder: Path) -> None:
    """Root would have written the page of a user's run to a disk of that user's choice."""
    (folder / PAGE).symlink_to(os.devnull)
    CliRunner().invoke(report, [str(folder)])
    assert not (folder / PAGE).is_symlink()
