"""``opsd launch`` when a rank crashes or hangs: who is blamed, and whether the run starts again."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.report.run import read_run
from opsd.report.text import restart_line
from tests.fakes.launched import TRAIN, Launched

TWO = "--nproc-per-node=2"


def test_killed_rank_restarts_all(tmp_path: Path) -> None:
    """A SIGKILL is noticed at once, blamed on the right rank, and all ranks start again with a new port."""
    source = TRAIN + (
        "print(os.environ['MASTER_PORT'], os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "die = lambda: rank == 1 and generation == 1 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "train(40, first=8 * (generation > 1), at=20, do=die)"
    )
    with Launched(tmp_path, source, TWO) as launched:
        assert launched.wait() == exitcodes.OK
        (exited,) = launched.events("rank_exited")
        assert (exited["rank"], exited["exit"], exited["step"], exited["culprit"]) == (1, "signal SIGKILL", 20, True)
        assert exited["noticed_s"] <= 0.2
        assert exited["error"] is None
        resumed = launched.event("resumed")
        assert (resumed["generation"], resumed["step"]) == (2, 8)
        assert resumed["lost_steps"] == resumed["previous_step"] - 8 + 1
        assert 0 < resumed["recovered_s"] < 30
        ports = {launched.log(0, 1).split()[0], launched.log(0, 2).split()[0]}
        assert len(ports) == 2
        assert launched.log(0, 2).split()[1] == "1"


def test_steps_without_numbers_are_not_taken_for_those_of_the_run(tmp_path: Path) -> None:
    """Whoever reports no numbers counts from 1 after a restart: how many are done again is not known, and said so."""
    source = TRAIN + (
        "for step in range(30 * (generation > 1), 60):\n"
        "    time.sleep(0.01)\n"
        "    reporter.step()\n"
        "    if step == 37 and generation == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Launched(tmp_path, source) as launched:
        assert launched.wait() == exitcodes.OK
        resumed = launched.event("resumed")
        assert [resumed[name] for name in ("step", "previous_step", "lost_steps")] == [None] * 3
        assert "how many steps are done again is not known" in launched.err
    run = read_run(tmp_path / "run")
    assert (run.last_step, run.repeated, run.ledger.steps) == (None, 0, 68)
    assert run.ledger.buckets["recomputed"] < 0.2
    assert "which ones were done again" in " ".join(run.ledger.notes)
    assert "not known" in restart_line(run.restarts[0])


def test_standby_interpreters_are_used_and_refilled(tmp_path: Path) -> None:
    """Once the run has made steps, a restart finds the program's imports done, for every rank and every time."""
    source = "import opsd_probe\n" + TRAIN + "train(10_000, step_s=0.02)"
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "opsd_probe.py").write_text("import os, sys\nprint('for', os.environ['RANK'], sys.argv, flush=True)\n")
    with Launched(tmp_path, source, TWO, env={"PYTHONPATH": str(site)}) as launched:
        launched.event("generation_started")
        for generation in (1, 2):
            launched.until(lambda: launched.ask(cmd="status")["standby"] == 2)
            pids = [entry["pid"] for entry in launched.events("generation_started")[-1]["ranks"]]
            os.kill(pids[0], signal.SIGKILL)
            launched.until(lambda: len(launched.events("resumed")) == generation)  # noqa: B023
        started = launched.events("generation_started")
        assert [event["standby"] for event in started[1:]] == [2, 2]
        assert launched.log(1, 1) == launched.log(1, 2) == f"for 1 ['{tmp_path}/prog.py']\n"


def test_standby_that_fails_is_not_used(tmp_path: Path) -> None:
    """An interpreter that cannot be warmed up costs a cold start and nothing else."""
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no GPU in here')")
    with Launched(tmp_path, TRAIN + "train(10_000)", "--standby-import", "broken_module") as launched:
        launched.until(lambda: "restarts will start cold" in launched.err)
        assert "no GPU in here" in (launched.run / "logs/standby-0.log").read_text()
        os.kill(launched.event("generation_started")["ranks"][0]["pid"], signal.SIGKILL)
        launched.event("resumed")
        assert [event["standby"] for event in launched.events("generation_started")] == [0, 0]


def test_standby_that_is_still_importing_becomes_the_rank(tmp_path: Path) -> None:
    """A restart that comes early waits for the imports under way, and goes on without them if they fail."""
    for number, ending in enumerate(("", "raise RuntimeError('late failure')")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "slow_module.py").write_text(f"import time\nprint('begun', flush=True)\ntime.sleep(1)\n{ending}")
        with Launched(folder, TRAIN + "train(10_000)", "--standby-import", "slow_module") as launched:
            log = launched.run / "logs/standby-0.log"
            launched.until(lambda: log.exists() and "begun" in log.read_text())  # noqa: B023
            os.kill(launched.event("generation_started")["ranks"][0]["pid"], signal.SIGKILL)
            assert launched.event("resumed")["generation"] == 2
            assert len(launched.events("rank_exited")) == 1


def test_error_of_the_program_at_the_same_step_stops(tmp_path: Path) -> None:
    """The same exception at the same step twice: a paragraph with rank, error, log and its last lines; exit code 70."""
    source = TRAIN + (
        "def fail():\n    if rank == 1:\n        raise ValueError('bad batch')\n    time.sleep(60)\n"
        "train(10, at=3, do=fail)"
    )
    with Launched(tmp_path, source, TWO, "--redirects=3") as launched:
        assert launched.wait() == exitcodes.REPEATED
        first, second = launched.events("rank_exited")
        assert first["error"] == {
            "type": "ValueError", "message": "bad batch", "where": f"{tmp_path}/prog.py:21 in fail",
        }  # fmt: skip
        assert (second["generation"], second["rank"], second["step"]) == (2, 1, 3)
        assert "Traceback" in first["log_tail"]
        assert "opsd/launch" not in first["log_tail"]
        for part in (
            "twice after step 3",
            "Rank 1",
            "ValueError: bad batch",
            "gen-0002/rank-0001.log",
            "    Traceback",
        ):
            assert part in launched.err
        assert launched.event("finished")["exit_code"] == exitcodes.REPEATED
        assert launched.state["state"] == "failed"


def test_same_failure_three_times_stops(tmp_path: Path) -> None:
    """A rank killed again and again without any progress ends the run with code 70."""
    source = TRAIN + "train(10, at=3, do=lambda: os.kill(os.getpid(), signal.SIGSEGV))"
    with Launched(tmp_path, source) as launched:
        assert launched.wait() == exitcodes.REPEATED
        assert len(launched.events("generation_started")) == 3
        assert "3 times without the run getting any further" in launched.err
        assert "Fatal Python error: Segmentation fault" in launched.err


def test_no_restarts(tmp_path: Path) -> None:
    """With --max-restarts 0 the first failure ends the run with code 1."""
    with Launched(tmp_path, "raise SystemExit(9)", "--max-restarts=0") as launched:
        assert launched.wait() == exitcodes.FAILED
        assert launched.event("rank_exited")["exit"] == "exit code 9"


def test_first_cause_is_blamed_not_the_victim(tmp_path: Path) -> None:
    """A rank that lost its connection is seen to fail first; the one with an exception of its own is named."""
    source = TRAIN + textwrap.dedent(
        """
        if generation == 1 and rank == 0:
            reporter.step()
            time.sleep(0.3)
            raise ValueError("mine")
        if generation == 1 and rank == 1:
            raise ConnectionResetError("Connection reset by peer")
        train(3)
        """
    )
    with Launched(tmp_path, source, TWO) as launched:
        assert launched.wait() == exitcodes.OK
        blamed = {event["rank"]: event["culprit"] for event in launched.events("rank_exited")}
        assert blamed == {0: True, 1: False}


def test_a_rank_that_ends_early_is_blamed(tmp_path: Path) -> None:
    """Its exit code is 0, but the others still needed it: they only say that they have lost a connection."""
    source = TRAIN + textwrap.dedent("""
        def die():
            if generation > 1:
                return
            if rank == 1:
                os._exit(0)
            time.sleep(0.3)
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35497")
        train(20, at=10, do=die)
    """)
    with Launched(tmp_path, source, TWO, "--no-standby") as launched:
        assert launched.wait() == exitcodes.OK
        exited = {event["rank"]: event for event in launched.events("rank_exited")}
        assert [exited[rank]["culprit"] for rank in (0, 1)] == [False, True]
        assert (exited[1]["exit"], exited[1]["step"]) == ("exit code 0", 10)
        assert "it ended while other ranks still communicated with it" in launched.err


def test_failure_is_noticed_before_the_interpreter_ends(tmp_path: Path) -> None:
    """An exception restarts the ranks at once, however long the failed interpreter would take to end."""
    source = TRAIN + textwrap.dedent(
        """
        import atexit
        atexit.register(lambda: generation == 1 and time.sleep(1000))
        train(3, at=1, do=lambda: 1 / (generation - 1))
        """
    )
    with Launched(tmp_path, source) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.event("rank_exited")["error"]["type"] == "ZeroDivisionError"


def test_error_file_of_torch_record_is_understood(tmp_path: Path) -> None:
    """A program that is no Python of ours but writes torch's error file is still blamed with its exception."""
    source = """
        import json, os, sys
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            extra = {"py_callstack": "...", "timestamp": "1700000000"}
            json.dump({"message": {"message": "KeyError: 'lr'", "extraInfo": extra}}, file)
        sys.exit(1)
    """
    program = (sys.executable, str(tmp_path / "prog.py"))
    with Launched(tmp_path, source, "--no-python", "--max-restarts=0", program=program) as launched:
        assert launched.wait() == exitcodes.FAILED
        assert launched.event("rank_exited")["error"] == {"type": "KeyError", "message": "'lr'", "where": ""}


@pytest.mark.slow
def test_stopped_rank_is_named_with_evidence(tmp_path: Path) -> None:
    """A SIGSTOPped rank is named within five seconds, with the stacks of all ranks taken before they are killed."""
    source = TRAIN + (
        "def stand():\n"
        "    if generation > 1: return\n"
        "    if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    with reporter.phase('collective'): wait_for_all()\n"
        "def wait_for_all(): time.sleep(1000)\n"
        "train(20, at=10, do=stand)"
    )
    with Launched(tmp_path, source, TWO) as launched:
        assert launched.wait() == exitcodes.OK
        hang = launched.event("hang_detected")
        assert (hang["rank"], hang["step"], hang["limit_s"]) == (1, 10, 5.0)
        assert max(rank["stuck_s"] for rank in hang["ranks"]) <= 2 * hang["limit_s"]
        assert "state T" in hang["reason"]
        assert [rank["process"] for rank in hang["ranks"]] == ["S", "T"]
        stacks = Path(hang["stacks"]).read_text()
        assert "wait_for_all" in stacks
        assert "stand" in stacks.split("rank 1")[1]
        assert launched.event("resumed")["generation"] == 2


@pytest.mark.slow
def test_endless_loop_is_named_by_its_phase(tmp_path: Path) -> None:
    """A rank that spins while the others wait is the culprit, and its stack shows where."""
    source = TRAIN + (
        "def spin():\n    while generation == 1: pass\n"
        "def stand():\n"
        "    if generation > 1: return\n"
        "    with reporter.phase('backward' if rank == 0 else 'collective'):\n"
        "        spin() if rank == 0 else time.sleep(1000)\n"
        "train(20, at=10, do=stand)"
    )
    with Launched(tmp_path, source, TWO) as launched:
        assert launched.wait() == exitcodes.OK
        hang = launched.event("hang_detected")
        assert (hang["rank"], hang["phase"]) == (0, "backward")
        assert any("spin" in sentence for sentence in hang["evidence"])
