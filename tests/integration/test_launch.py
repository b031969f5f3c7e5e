"""``opsd launch`` with real processes: what users and the rest of opsd see of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.launched import TRAIN, Launched, alive

TWO = "--nproc-per-node=2"
STANDARD_SIGNALS = (1 << 31) - 1
"""Signals 1 to 31 of a mask in /proc: what the C library keeps to itself above them is inherited from the shell."""


# -- the ordinary way ------------------------------------------------------------------------------------------------


def test_program_runs_as_python_would_run_it(tmp_path: Path) -> None:
    """Script, arguments, import path, ``__main__`` and the rank's environment are what the program expects."""
    source = """
        import json, os, sys
        main = sys.modules["__main__"]
        print(json.dumps({
            "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "spec": __spec__,
            "same": main.__dict__ is globals(), "env": {k: os.environ.get(k) for k in
            ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OPSD_RUN", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "OMP_NUM_THREADS")},
            "files": sorted(os.listdir("/proc/self/fd")),
        }))
    """
    with Launched(tmp_path, source, TWO, "--redirects=3", args=("--lr", "1e-3", "-m")) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out == ""
        seen = json.loads(launched.log(rank=1))
    script = str(tmp_path / "prog.py")
    assert seen["argv"] == [script, "--lr", "1e-3", "-m"]
    assert seen["path"] == str(tmp_path)
    assert (seen["name"], seen["file"], seen["spec"], seen["same"]) == ("__main__", script, None, True)
    assert seen["env"] == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "OPSD_RUN": "r", "TORCHELASTIC_RUN_ID": "r",
        "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert len(seen["files"]) == 5  # stdin, stdout, stderr, the launcher's channel, and the one that lists them


def test_module_runs_as_python_m_would(tmp_path: Path) -> None:
    """With -m the program knows its package, in the working directory first of all."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("")
    (tmp_path / "mine/part.py").write_text("NAME = 'part'\n")
    main = "import sys\nfrom .part import NAME\nprint(NAME, __spec__.name, sys.argv[1:])"
    (tmp_path / "mine/__main__.py").write_text(main)
    with Launched(tmp_path, "", "-m", program=("mine", "a")) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out == "part mine.__main__ ['a']\n"


@pytest.mark.parametrize("how", ["script", "module"])
def test_multiprocessing_spawn_finds_main(tmp_path: Path, how: str) -> None:
    """Workers that the program starts with "spawn" find functions of its main module."""
    source = """
        import multiprocessing

        def square(x):
            return x * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]))
    """
    flags, program = ((), None) if how == "script" else (("-m",), ("prog",))
    with Launched(tmp_path, source, *flags, program=program) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out == "[1, 4, 9]\n"


def test_any_executable(tmp_path: Path) -> None:
    """With --no-python the program is executed as it is, with default signals and the rank's environment."""
    script = tmp_path / "prog.sh"
    script.write_text('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE: $1"\ngrep SigIgn /proc/self/status\n')
    script.chmod(0o755)
    with Launched(tmp_path, "", TWO, "--no-python", program=(str(script), "x")) as launched:
        assert launched.wait() == exitcodes.OK
        assert "[rank1]: rank 1 of 2: x\n" in launched.out
        masks = [int(line.split()[-1], 16) for line in launched.out.splitlines() if "SigIgn" in line]
        assert [mask & STANDARD_SIGNALS for mask in masks] == [0, 0]


def test_rank_that_ends_early_is_waited_for_no_more(tmp_path: Path) -> None:
    """A rank may end with 0 long before the others; the run ends with the last."""
    source = TRAIN + "train(1 if rank == 0 else 60)"
    with Launched(tmp_path, source, TWO) as launched:
        assert launched.wait() == exitcodes.OK
        assert [event["event"] for event in launched.events()] == ["generation_started", "finished"]


def test_run_is_visible_to_others(tmp_path: Path) -> None:
    """run.json, the rank pages and both copies of the events are where the agent looks for them."""
    source = TRAIN + "train(10_000)"
    with Launched(tmp_path, source, TWO) as launched:
        started = launched.event("generation_started")
        launched.until(lambda: len(list(launched.memory.glob("rank-*.page"))) == 2)
        assert launched.state["state"] == "running"
        assert launched.state["launcher_pid"] == launched.process.pid
        assert {entry["rank"] for entry in started["ranks"]} == {0, 1}
        launched.signal(signal.SIGTERM)
        assert launched.wait() == exitcodes.REQUEUE
        assert launched.state["state"] == "finished"
        lines = (launched.memory / "events.jsonl").read_text()
        assert lines == (launched.run / "events.jsonl").read_text() == (tmp_path / "events.jsonl").read_text()
        assert not (launched.memory / "control.sock").exists()


def test_what_ranks_report_is_passed_on(tmp_path: Path) -> None:
    """Committed checkpoints and the rare events of ranks appear in the launcher's stream."""
    source = TRAIN + (
        "reporter.checkpoint_committed(5)\n"
        "time.sleep(0.6)\n"
        "reporter.event('checkpoint_rejected', step=5, file='a.bin', why='checksum', node='?')\n"
        "with open(os.environ['OPSD_RANK_PAGE'] + '.events.jsonl', 'a') as file:\n"
        '    file.write(\'{"event": "odd", "self": 1, "t": NaN}\\n\')\n'
        "time.sleep(0.6)\n"
        "train(30, at=5, do=lambda: reporter.checkpoint_committed(5))"
    )
    with Launched(tmp_path, source) as launched:
        assert launched.wait() == exitcodes.OK
        assert [event["step"] for event in launched.events("checkpoint_committed")] == [5, 5]
        rejected = launched.event("checkpoint_rejected")
        assert (rejected["rank"], rejected["step"], rejected["why"]) == (0, 5, "checksum")
        assert rejected["node"] == launched.event("generation_started")["node"]


# -- crashes ---------------------------------------------------------------------------------------------------------


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


def test_standby_interpreters_are_used_and_refilled(tmp_path: Path) -> None:
    """Once the run has made steps, a restart finds the program's imports done, for every rank and every time."""
    source = TRAIN + (
        "import colorsys\n"
        "print('warm' if 'opsd_probe' in sys.modules else 'cold', flush=True)\n"
        "import opsd_probe\n"
        "train(10_000, step_s=0.02)"
    )
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "opsd_probe.py").write_text("import os\nprint('imported by', os.environ['LOCAL_RANK'], flush=True)\n")
    with Launched(tmp_path, source, TWO, env={"PYTHONPATH": str(site)}) as launched:
        launched.event("generation_started")
        for generation in (1, 2):
            launched.until(lambda: launched.ask(cmd="status")["standby"] == 2)
            pids = [entry["pid"] for entry in launched.events("generation_started")[-1]["ranks"]]
            os.kill(pids[0], signal.SIGKILL)
            launched.until(lambda: len(launched.events("resumed")) == generation)  # noqa: B023
        started = launched.events("generation_started")
        assert [event["standby"] for event in started[1:]] == [2, 2]
        assert launched.log(1, 1).startswith("cold")
        assert launched.log(1, 2).startswith("warm")


def test_standby_that_fails_is_not_used(tmp_path: Path) -> None:
    """An interpreter that cannot be warmed up costs a cold start and nothing else."""
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no GPU in here')")
    with Launched(tmp_path, TRAIN + "train(10_000)", "--standby-import", "broken_module") as launched:
        launched.until(lambda: "restarts will start cold" in launched.err)
        assert "no GPU in here" in (launched.run / "logs/standby.log").read_text()
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
            log = launched.run / "logs/standby.log"
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
            "type": "ValueError", "message": "bad batch", "where": f"{tmp_path}/prog.py:20 in fail",
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


# -- hangs -----------------------------------------------------------------------------------------------------------


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
        assert max(rank["stuck_s"] for rank in hang["ranks"]) <= hang["limit_s"]
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


# -- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("everyone", [False, True])
def test_stop_at_a_step_boundary(tmp_path: Path, number: signal.Signals, everyone: bool) -> None:
    """SIGTERM and SIGUSR1 let the ranks stop at a step boundary, also when Slurm signals every process of the job."""
    source = TRAIN + "train(10_000)\nprint('stopped in order')"
    with Launched(tmp_path, source, TWO) as launched:
        started = launched.event("generation_started")
        launched.until(lambda: len(list(launched.memory.glob("rank-*.page"))) == 2)
        if everyone:
            for entry in started["ranks"]:
                os.kill(entry["pid"], number)
        launched.signal(number)
        assert launched.wait() == exitcodes.REQUEUE
        assert launched.log(0) == launched.log(1) == "stopped in order\n"
        requeued = launched.event("requeued")
        assert requeued["signal"] == number.name
        assert launched.events()[-1]["exit_code"] == exitcodes.REQUEUE
        assert not launched.events("rank_exited")


def test_rank_without_page_gets_the_signal(tmp_path: Path) -> None:
    """A program that does not know opsd is sent SIGTERM; its own handler may end it in order."""
    source = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
        print("ready", flush=True)
        time.sleep(1000)
    """
    with Launched(tmp_path, source) as launched:
        launched.until(lambda: "ready" in launched.log())
        launched.signal(signal.SIGTERM)
        assert launched.wait() == exitcodes.REQUEUE
        assert "saved" in launched.log()


def test_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """Who does not stop in time is killed, and the exit code does not claim that anything was saved."""
    source = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(1000)
    """
    with Launched(tmp_path, source, "--stop-timeout=0.5") as launched:
        launched.until(lambda: "ready" in launched.log())
        launched.signal(signal.SIGTERM)
        assert launched.wait() == exitcodes.FAILED
        assert "rank 0 did not stop in time after SIGTERM" in launched.event("finished")["reason"]


def test_interrupt_stops_fast(tmp_path: Path) -> None:
    """Ctrl-C ends everything at once, with its own exit code."""
    with Launched(tmp_path, TRAIN + "train(10_000)", TWO) as launched:
        pids = [entry["pid"] for entry in launched.event("generation_started")["ranks"]]
        launched.signal(signal.SIGINT)
        assert launched.wait(10) == exitcodes.INTERRUPTED
        assert not any(alive(pid) for pid in pids)


def test_control_socket(tmp_path: Path) -> None:
    """The agent can ask for the state, a restart and a stop."""
    with Launched(tmp_path, TRAIN + "train(10_000)", TWO) as launched:
        launched.until(lambda: len(list(launched.memory.glob("rank-*.page"))) == 2)
        assert launched.ask(cmd="status").items() >= launched.state.items()
        assert launched.ask(cmd="restart", reason="straggler") == {"ok": True}
        assert launched.event("resumed")["generation"] == 2
        assert launched.event("restart_requested")["reason"] == "straggler"
        assert launched.ask(cmd="fly")["ok"] is False
        assert launched.ask(cmd="stop") == {"ok": True}
        assert launched.wait() == exitcodes.REQUEUE
        assert launched.event("requeued")["signal"] == "control"


# -- leftovers -------------------------------------------------------------------------------------------------------

FORKS = """
import os, subprocess, sys, time
for detached in (False, True):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=detached)
    print(child.pid, flush=True)
"""


@pytest.mark.parametrize(("ending", "code"), [("", exitcodes.OK), ("os.kill(os.getpid(), 9)", exitcodes.FAILED)])
def test_children_that_outlive_a_rank_are_cleaned_up(tmp_path: Path, ending: str, code: int) -> None:
    """Whatever a rank started ends with its generation, daemons in sessions of their own included."""
    with Launched(tmp_path, FORKS + ending, "--max-restarts=0") as launched:
        assert launched.wait() == code
        pids = [int(line) for line in launched.log().split()]
        assert len(pids) == 2
        assert not any(alive(pid) for pid in pids)


SAVES = """
import os, subprocess, sys
from opsd.client import PERSIST, Reporter
reporter = Reporter.from_env()
save = "import pathlib, sys, time; time.sleep(1.5); pathlib.Path(sys.argv[1]).write_text('saved')"
child = subprocess.Popen([sys.executable, "-c", save, sys.argv[1]], start_new_session=True)
reporter.add_worker(child.pid, PERSIST)
reporter.step()
os.kill(os.getpid(), 9)
"""


def test_a_checkpoint_being_written_outlives_its_rank(tmp_path: Path) -> None:
    """The process that has the staged state in hand is left to finish when its rank is killed."""
    target = tmp_path / "checkpoint"
    with Launched(tmp_path, SAVES, "--max-restarts=0", args=(str(target),)) as launched:
        assert launched.wait() == exitcodes.FAILED
        launched.until(target.exists)


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    """A launcher that is killed leaves no rank behind, and the next one of the same run takes over and counts on."""
    with Launched(tmp_path, TRAIN + "train(10_000)", TWO) as launched:
        pids = [entry["pid"] for entry in launched.event("generation_started")["ranks"]]
        launched.until(lambda: len(list(launched.memory.glob("rank-*.page"))) == 2)
        launched.signal(signal.SIGKILL)
        launched.until(lambda: not any(alive(pid) for pid in pids))
    with Launched(tmp_path, TRAIN + "train(3)", TWO) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.events("generation_started")[-1]["generation"] == 2


def test_second_launcher_of_a_run_is_refused(tmp_path: Path) -> None:
    """Two launchers cannot share a run; the first goes on undisturbed."""
    with Launched(tmp_path, TRAIN + "train(10_000)") as first:
        first.until(lambda: (first.memory / "rank-0000.page").exists())
        with Launched(tmp_path, TRAIN + "train(10_000)") as second:
            assert second.wait() == exitcodes.USAGE
            assert f"run by process {first.process.pid}" in second.err
        assert first.state["state"] == "running"


@pytest.mark.slow
def test_100_megabytes_of_output(tmp_path: Path) -> None:
    """A rank that prints 100 MB is not slowed down, loses nothing, and the launcher's memory stays small."""
    source = TRAIN + (
        "began = time.monotonic()\n"
        "line = 'x' * 1023 + '\\n'\n"
        "for _ in range(100):\n    sys.stdout.write(line * 1024)\n"
        "sys.stdout.flush()\n"
        "print('seconds', time.monotonic() - began, file=sys.stderr)\n"
        "train(300)"
    )
    with Launched(tmp_path, source) as launched:
        peak = 0
        while launched.process.poll() is None:
            status = Path(f"/proc/{launched.process.pid}/status").read_text()
            peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
        assert launched.wait() == exitcodes.OK
        assert (launched.run / "logs/gen-0001/rank-0000.log").stat().st_size > 100 << 20
        assert (tmp_path / "out").stat().st_size == (launched.run / "logs/gen-0001/rank-0000.log").stat().st_size
        assert float(launched.log().rpartition("seconds ")[2]) < 30
        assert 0 < peak < 60 * 1024


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "program", "code", "says"),
    [
        ((), ("no-such.py",), exitcodes.NOT_FOUND, "there is no file"),
        (("-m",), ("no_such_module",), exitcodes.NOT_FOUND, "there is no module no_such_module"),
        (("-m",), ("xml",), exitcodes.NOT_FOUND, "there is no module xml that can be run"),
        (("--no-python",), ("no-such-program",), exitcodes.NOT_FOUND, "there is no program no-such-program"),
        (("--no-python",), ("./prog.py",), exitcodes.NOT_FOUND, "there is no program ./prog.py that can be executed"),
        (("--log-dir=/proc/x",), ("prog.py",), exitcodes.USAGE, "cannot be made"),
        (("--nnodes=2",), ("prog.py",), exitcodes.USAGE, "name them with --nodes"),
        (("--nproc-per-node=0",), ("prog.py",), exitcodes.USAGE, "is not a number of ranks"),
        (("--nproc_per_node=many",), ("prog.py",), exitcodes.USAGE, "is not a number of ranks"),
        (("--tee=9",), ("prog.py",), exitcodes.USAGE, "pairs such as 0:3,1:1"),
        (("--run-id=../x",), ("prog.py",), exitcodes.USAGE, "63 at most"),
        (("-m", "--no-python"), ("prog.py",), exitcodes.USAGE, "exclude each other"),
        (("--events=/proc/x",), ("prog.py",), exitcodes.USAGE, "/proc/x cannot be written"),
        (("--no-such-flag",), ("prog.py",), exitcodes.USAGE, "No such option"),
    ],
)
def test_bad_input(tmp_path: Path, flags: tuple[str, ...], program: tuple[str, ...], code: int, says: str) -> None:
    """What cannot be launched is refused with its exit code and one sentence that says why, without a restart."""
    with Launched(tmp_path, "", *flags, program=program) as launched:
        assert launched.wait() == code
        assert says in launched.err
        assert "Traceback" not in launched.err
        assert len(launched.events("generation_started")) <= 1


def test_program_that_ends_at_once(tmp_path: Path) -> None:
    """An empty program is a finished run."""
    with Launched(tmp_path, "", TWO) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.event("finished")["reason"] == "all ranks finished"


def test_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    """An interpreter for the ranks that is not there is refused like a program that is not there."""
    with Launched(tmp_path, "", env={"PYTHON_EXEC": "/no/such/python"}) as launched:
        assert launched.wait() == exitcodes.NOT_FOUND
        assert "PYTHON_EXEC" in launched.err


def test_help_names_the_exit_codes() -> None:
    """The help is complete without a manual: flags and exit codes."""
    command = [sys.executable, "-m", "opsd", "launch", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(word in text for word in ("--nproc-per-node", "--max-restarts", "75 checkpointed", "127 the program"))
