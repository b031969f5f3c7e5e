"""``opsd launch`` with real processes: how the program runs, and what others see of the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.launched import TRAIN, Launched

TWO = "--nproc-per-node=2"
STANDARD_SIGNALS = (1 << 31) - 1
"""Signals 1 to 31 of a mask in /proc: what the C library keeps to itself above them is inherited from the shell."""


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
    with Launched(tmp_path, "", TWO, "--no-python", "--tee=3", program=(str(script), "x")) as launched:
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
        assert launched.event("stopped")["signal"] == "control"


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
        assert (tmp_path / "out").stat().st_size == 100 << 20
        logs = [path.stat().st_size for path in (launched.run / "logs/gen-0001").glob("rank-0000.log*")]
        assert max(logs) <= 64 << 20
        assert sum(logs) > 100 << 20
        assert float(launched.err.rpartition("seconds ")[2].split()[0]) < 30
        assert 0 < peak < 60 * 1024


def test_help_names_the_exit_codes() -> None:
    """The help is complete without a manual: flags and exit codes."""
    command = [sys.executable, "-m", "opsd", "launch", "--help"]
    text = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    wanted = ("--nproc-per-node", "--max-restarts", "75 stopped in good order", "127 the program")
    assert all(words in text for words in wanted)
