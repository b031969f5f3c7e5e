"""`opsd preflight` as a user runs it: real checks, files, history, interruptions, mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from opsd.preflight.base import Verdict
from opsd.preflight.report import Report
from tests.fakes.clock import eventually
from tests.fakes.preflight import VERSIONS, report

QUICK = ("versions", "limits", "hugepages", "numa")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OPSD_")}
    config = tmp_path / "opsd.toml"
    config.write_text("", encoding="utf-8")
    return {**clean, "OPSD_STATE_DIR": str(tmp_path / "state"), "OPSD_CONFIG": str(config), "COLUMNS": "200"}


def opsd(environment: dict[str, str], *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opsd", "preflight", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False, **options)


def test_one_command_checks_the_node_and_writes_every_format(environment: dict[str, str], tmp_path: Path):
    """A page for people, JSON, JUnit, Markdown and metrics from the same run; exit 0."""
    files = {form: tmp_path / f"report.{form}" for form in ("json", "junit", "markdown", "textfile")}
    options = [part for form, path in files.items() for part in (f"--{form}", path)]
    result = opsd(environment, "--only", ",".join(QUICK), *options)
    assert result.returncode == 0, result.stderr
    assert "passed preflight (quick)" in result.stdout.splitlines()[-1]
    found = Report.from_json(files["json"].read_bytes())
    assert [r.check for r in found.results] == list(QUICK)
    assert ElementTree.parse(files["junit"]).getroot().get("tests") == "4"
    assert files["markdown"].read_text(encoding="utf-8").startswith("## ")
    assert "opsd_preflight_passed" in files["textfile"].read_text(encoding="utf-8")


def test_json_on_stdout_is_nothing_but_json(environment: dict[str, str]):
    """The page for people goes to stderr then."""
    result = opsd(environment, "--only", "versions", "--json", "-")
    assert json.loads(result.stdout)["profile"] == "quick"
    assert "passed preflight" in result.stderr


def test_the_history_shows_runs_and_trends(environment: dict[str, str]):
    """Two runs, one curve per series."""
    for _ in range(2):
        opsd(environment, "--only", "numa", "--set", "agent.node=node-7")
    result = opsd(environment, "--set", "agent.node=node-7", "history")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("passed") == 2
    assert "numa nodes" in result.stdout
    found = json.loads(opsd(environment, "--set", "agent.node=node-7", "history", "--json").stdout)
    assert (found["node"], [run["passed"] for run in found["runs"]]) == ("node-7", [True, True])
    assert {(trend["check"], len(trend["past"])) for trend in found["trends"]} == {("numa", 2)}


def test_a_node_without_history_is_an_answer_not_a_table(environment: dict[str, str]):
    """The sentence says which nodes there are."""
    opsd(environment, "--only", "numa", "--set", "agent.node=node-7")
    result = opsd(environment, "history", "node-8")
    assert result.returncode == 1
    assert "has no run of node-8; there are runs of node-7" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "memry"], "there is no check memry; did you mean memory?"),
        (["--skip", "zzzzzz"], "`opsd preflight list` shows them"),
        (["--only", "cpu", "--skip", "cpu"], "no check is left to run"),
        (["--profile", "fast"], "'fast' is not one of"),
        (["--config", "/does/not/exist.toml"], "/does/not/exist.toml: cannot be read"),
        (["--set", "preflight.optional=['stroage_local']"], "did you mean storage_local?"),
        (["--set", "preflight.limits={memory={bandwith=1.0}}"], "it has bandwidth"),
        (["--set", "preflight.gpus=-1"], "preflight.gpus"),
        (["--set", "preflight.fleet=/does/not/exist.json"], "`opsd preflight merge` writes one"),
        (["--train", "smollm"], "neither a .toml file nor a preset"),
        (["--train", "/no/run.toml"], "there is no file /no/run.toml"),
        (["--hours", "2"], "--hours belongs to --profile burn-in"),
        (["--profile", "burn-in", "--alerts"], "--alerts belongs to --profile quick and standard"),
        (["--profile", "burn-in", "--hours", "100"], "100.0 is not in the range"),
        (["merge", "/dev/null"], "/dev/null: not a preflight report"),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_2(environment: dict[str, str], arguments: list[str], sentence: str):
    """Nothing is started, nothing looks like a traceback."""
    result = opsd(environment, *arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_full_disk_is_said_and_the_exit_code_stays(environment: dict[str, str]):
    """The verdict does not depend on whether it could be written down."""
    result = opsd(environment, "--only", "numa", "--json", "/dev/full")
    assert result.returncode == 0
    assert "the report was not written to /dev/full: No space left on device; the verdict stands" in result.stdout


def test_a_history_that_cannot_be_used_is_said_and_the_exit_code_stays(environment: dict[str, str], tmp_path: Path):
    """A damaged file, as a full disk may leave it."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state/preflight.sqlite").write_bytes(b"x" * 8192)
    result = opsd(environment, "--only", "numa")
    assert result.returncode == 0
    assert "preflight.sqlite cannot be used" in result.stdout


def test_a_limit_from_the_configuration_fails_the_node(environment: dict[str, str]):
    """Exit 1, and the sentence says how far below."""
    result = opsd(environment, "--only", "limits", "--set", "preflight.limits={limits={shm_free=1e15}}")
    assert result.returncode == 1
    assert "below the limit of 1 PB" in result.stdout


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--only", "numa"), "fit\n"),
        (("--only", "limits", "--set", "preflight.limits={limits={shm_free=1e15}}"), "unfit\n"),
        (("--only", "no-such-check"), None),
    ],
)
def test_the_verdict_is_one_word(
    environment: dict[str, str], tmp_path: Path, options: tuple[str, ...], word: str | None
):
    """For scripts, such as Slurm's prolog; none from a preflight that could not begin, whatever its exit code is."""
    file = tmp_path / "verdict"
    opsd(environment, *options, "--verdict", file)
    assert (file.read_text() if file.exists() else None) == word


def test_there_is_no_verdict_before_the_checks_have_ended(environment: dict[str, str], tmp_path: Path):
    """One that is killed while it measures has written none: a word there would drain the node."""
    file = tmp_path / "verdict"
    command = [sys.executable, "-m", "opsd", "preflight", "--only", "cpu", "--verdict", str(file)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    assert eventually(lambda: len(psutil.Process(process.pid).children(recursive=True)) > 0)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not file.exists()


def is_check(process: psutil.Process) -> bool:
    """Whether it runs a check; other children come before the checks do."""
    try:
        return "opsd.preflight.worker" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def interrupted(environment: dict[str, str], target: Path, *arguments: str, signals: int = 1) -> tuple[int, list[int]]:
    """Start, wait for a check, interrupt; the exit code and the pids of all children seen."""
    command = [sys.executable, "-m", "opsd", "preflight", "--json", str(target), *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    me = psutil.Process(process.pid)
    assert eventually(lambda: any(is_check(child) for child in me.children(recursive=True)))
    children = [child.pid for child in me.children(recursive=True)]
    for _ in range(signals):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
    return process.wait(timeout=60), children


@pytest.mark.parametrize("signals", [1, 3])
def test_ctrl_c_ends_every_child_writes_what_there_is_and_exits_3(
    environment: dict[str, str], tmp_path: Path, signals: int
):
    """While a check measures a speed, with one Ctrl-C and with an impatient user's three."""
    target = tmp_path / "report.json"
    arguments = ("--profile", "burn-in", "--only", "cpu")
    code, children = interrupted(environment, target, *arguments, signals=signals)
    assert code == 3
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in children))
    found = Report.from_json(target.read_bytes())
    assert found.interrupted
    assert found.results[0].verdict is Verdict.COULD_NOT_RUN


def test_ctrl_c_while_checks_run_side_by_side(environment: dict[str, str], tmp_path: Path):
    """The other phase."""
    target = tmp_path / "report.json"
    code, children = interrupted(environment, target, "--only", "versions,limits,numa,cpu")
    assert code == 3
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in children))
    assert Report.from_json(target.read_bytes()).interrupted


def ended(process: psutil.Process) -> bool:
    """True if nothing of it runs any more, whether or not it has been waited for."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ctrl_c_while_the_run_is_tried_leaves_nothing_of_it(environment: dict[str, str], tmp_path: Path):
    """The launcher and its ranks end, and the folder with the checkpoints goes."""
    pytest.importorskip("torch")
    storage, target = tmp_path / "storage", tmp_path / "report.json"
    storage.mkdir()
    run = ("--train", "tiny", "--train-set", "data.shards=/data", "--train-set", f"run.folder={storage}")
    command = [sys.executable, "-m", "opsd", "preflight", "--only", "run_steps", *run, "--json", str(target)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    assert eventually(lambda: any(storage.glob("opsd-drill-*/output")), within_s=60)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 3
    assert eventually(lambda: all(map(ended, children)))
    assert [*storage.iterdir()] == []
    assert Report.from_json(target.read_bytes()).interrupted


def test_ctrl_c_while_the_report_is_written_leaves_a_whole_one(environment: dict[str, str], tmp_path: Path):
    """All that was to be measured has been; it goes into a pipe here that nobody reads yet, and the verdict stands."""
    pipe = tmp_path / "report.json"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "opsd", "preflight", "--only", "numa", "--json", str(pipe)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any("passed preflight" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    assert not Report.from_json(pipe.read_bytes()).interrupted
    assert process.wait(timeout=60) == 0


def test_ctrl_c_before_anything_was_started_is_exit_3(environment: dict[str, str], tmp_path: Path):
    """While the configuration is read, here from a pipe into which nobody writes."""
    os.mkfifo(tmp_path / "slow.toml")
    command = [sys.executable, "-m", "opsd", "preflight", "--config", str(tmp_path / "slow.toml")]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    writer: list[int] = []

    def is_read() -> bool:
        with suppress(OSError):  # ENXIO until there is a reader
            writer.append(os.open(tmp_path / "slow.toml", os.O_WRONLY | os.O_NONBLOCK))
        return bool(writer)

    def waits() -> bool:
        """Python does not see a signal that comes between the opening of a file and the reading of it."""
        states = []
        for _ in range(20):
            states.append(psutil.Process(process.pid).status())
            time.sleep(0.01)
        return set(states) == {psutil.STATUS_SLEEPING}

    assert eventually(is_read, within_s=60)
    assert eventually(waits, within_s=60)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 3
    os.close(writer[0])
    assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_ctrl_c_ends_a_drill_with_all_that_it_started(environment: dict[str, str], tmp_path: Path):
    """While the launcher waits for the other node."""
    pytest.importorskip("torch")
    target, folder = tmp_path / "report.json", tmp_path / "drill"
    options = ("--hosts", "127.0.0.2,127.0.0.3", "--node", "0", "--train", "tiny", "--train-set", "data.shards=/data")
    command = [sys.executable, "-m", "opsd", "preflight", "drill", *options, "--folder", folder, "--json", target]
    process = subprocess.Popen([*map(str, command)], env=environment, stdout=subprocess.DEVNULL)
    me = psutil.Process(process.pid)
    assert eventually(lambda: len(me.children(recursive=True)) > 0, within_s=60)
    children = [child.pid for child in me.children(recursive=True)]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 3
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in children))
    assert Report.from_json(target.read_bytes()).interrupted


def test_a_burn_in_that_was_killed_goes_on_where_it_was(environment: dict[str, str], tmp_path: Path):
    """After a power cut the rounds that were over count; the report has them all."""
    command = ("--profile", "burn-in", "--only", "numa", "--json", tmp_path / "report.json")
    running = subprocess.Popen(
        [sys.executable, "-m", "opsd", "preflight", *map(str, command), "--hours", "1"],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    assert eventually(lambda: any((tmp_path / "state/burn-in").glob("*/round-0001.json")), within_s=60)
    running.kill()
    running.wait()
    done = opsd(environment, *command, "--hours", "0.0001")
    assert done.returncode == 0, done.stderr
    assert "goes on with the burn-in in" in done.stdout
    found = Report.from_json((tmp_path / "report.json").read_bytes())
    assert next(value.value for value in found.results[-1].values if value.measure == "rounds") >= 1


def test_merge_names_the_nodes_that_failed_and_those_that_differ(environment: dict[str, str], tmp_path: Path):
    """Many reports, one page; exit 1 because a version differs."""
    for index, kernel in enumerate(["6.8", "6.8", "6.5"]):
        found = report(replace(VERSIONS, facts={"kernel": kernel}), node=f"node-{index}")
        (tmp_path / f"{index}.json").write_text(found.to_json(), encoding="utf-8")
    result = opsd(environment, "merge", *sorted(tmp_path.glob("*.json")), "--fleet", tmp_path / "fleet.out")
    assert result.returncode == 1
    assert "3 nodes passed: node-[0-2]" in result.stdout
    assert "kernel is 6.5 on node-2; 2 of 3 nodes have 6.8" in result.stdout
    assert (tmp_path / "fleet.out").exists()
    merged = json.loads(opsd(environment, "merge", "--json", *sorted(tmp_path.glob("*.json"))).stdout)
    assert (merged["passed"], merged["failed"]) == (["node-0", "node-1", "node-2"], {})
    assert [(found["fact"], found["value"], found["nodes"]) for found in merged["deviations"]] == [
        ("kernel", "6.5", ["node-2"])
    ]


def test_results_that_cannot_be_written_are_said_after_they_were_shown(environment: dict[str, str], tmp_path: Path):
    """Exit 1 and one sentence: the file that was asked for does not exist."""
    (tmp_path / "0.json").write_text(report(VERSIONS, node="node-0").to_json(), encoding="utf-8")
    nowhere = tmp_path / "none/file"
    merged = opsd(environment, "merge", tmp_path / "0.json", "--fleet", nowhere)
    assert "node passed" in merged.stdout
    assert merged.returncode == 1
    assert merged.stderr == f"opsd: the medians could not be written to {nowhere}: No such file or directory\n"


@pytest.mark.slow
def test_the_quick_profile_takes_minutes_at_most(environment: dict[str, str], tmp_path: Path):
    """Every check that applies here runs for real."""
    target = tmp_path / "report.json"
    began = time.monotonic()
    opsd(environment, "--json", target)
    assert time.monotonic() - began < 240
    found = Report.from_json(target.read_bytes())
    measured = {result.check for result in found.results if result.values}
    assert {"cpu", "memory", "limits", "pressure"} <= measured
