"""`opsd launch` when a rank crashes or hangs: who is blamed, and whether the run starts again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.report.run import read_run
from opsd.report.text import restart_line
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually
from tests.fakes.launched import TRAIN, Launched
from tests.fakes.nodes import Nodes

# ``opsd launch`` when a rank crashes or hangs: who is blamed, and whether the run starts again.


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


# ``opsd launch`` on programs that report nothing: hangs are named by what processes do, and by flight recorders.


PLAIN = """
import os, signal, sys, threading, time
rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def barrier():
    time.sleep(1000)

def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))

def hang():
    if WHAT == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif WHAT == "fifo":
        os.mkfifo("fifo")
        open("fifo").read()
    elif WHAT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)

if first:
    work(1)
    hang() if rank == 1 else barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "limit_s"), [("lock", 3.0), ("fifo", 3.0), ("stop", 2.0)])
def test_a_rank_that_reports_nothing_is_named(tmp_path: Path, what: str, limit_s: float) -> None:
    """Dead-locked, stuck in a read, or stopped: the rank that is not in the barrier, and the run goes on."""
    flags = ("--nproc-per-node=2", "--no-standby", "--idle-limit=3", "--hang-limit=2")
    with Launched(tmp_path, f"WHAT = {what!r}\n{PLAIN}", *flags) as launched:
        assert launched.wait() == exitcodes.OK
        (hang,) = launched.events("hang_detected")
        assert (hang["rank"], hang["phase"], hang["limit_s"]) == (1, "unknown", limit_s)
        assert hang["stuck_s"] < limit_s + 20
        assert "hang" in Path(hang["stacks"]).read_text().split("rank 1")[1]


@pytest.mark.slow
def test_a_program_that_is_no_python_is_named(tmp_path: Path) -> None:
    """A shell script whose child is stopped."""
    script = tmp_path / "train.sh"
    script.write_text(
        '[ "$TORCHELASTIC_RESTART_COUNT" = 0 ] || exit 0\nsleep 1000 &\n[ "$RANK" = 0 ] || kill -STOP $!\nwait\n'
    )
    flags = ("--nproc-per-node=2", "--no-python", "--idle-limit=60", "--hang-limit=2")
    with Launched(tmp_path, "", *flags, program=("sh", str(script))) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.event("hang_detected")["rank"] == 1


@pytest.mark.slow
def test_what_works_without_reporting_is_left_alone(tmp_path: Path) -> None:
    """One rank computes for four times the limit, the other waits for it."""
    source = PLAIN.replace("hang() if rank == 1 else barrier()", "work(10) if rank == 1 else time.sleep(11)")
    with Launched(tmp_path, f"WHAT = ''\n{source}", "--nproc-per-node=2", "--idle-limit=2.5") as launched:
        assert launched.wait() == exitcodes.OK
        assert not launched.events("hang_detected")


GLOO = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for number in range(8):
    if not (first and number == 5 and dist.get_rank() == 1):
        dist.barrier()
    dist.all_reduce(torch.ones(4))
os._exit(0)
"""


def three_ranks(folder: Path, code: str) -> Launched:
    """A launcher of three ranks that run ``code``."""
    pytest.importorskip("torch", reason="torch is not installed")
    program = folder / "prog_gloo.py"
    program.write_text(code)
    flags = ("--nproc-per-node=3", "--no-standby", "--idle-limit=4")
    return Launched(folder, "", *flags, program=(str(program),), env={"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_a_skipped_collective_is_named_by_the_flight_recorder(tmp_path: Path) -> None:
    """All ranks wait in collectives, and stacks do not say who is wrong; dumps are on disk before the ranks end."""
    with three_ranks(tmp_path, GLOO) as launched:
        assert launched.wait(180) == exitcodes.OK
        hang = launched.event("hang_detected")
        assert hang["rank"] == 1
        assert hang["flight_recorder"] == {"culprits": [1], "cause": "called something else", "confidence": 0.85}
        assert any("flight recorder: rank 1" in sentence for sentence in hang["evidence"])
        dumps = sorted((launched.run / "flight_recorder").glob("rank-*.json"))
        assert [json.loads(dump.read_bytes())["opsd_generation"] for dump in dumps] == [1, 1, 1]
        ended = [event["t"] for event in launched.events("generation_started")][1]
        assert max(dump.stat().st_mtime for dump in dumps) < hang["t"] <= ended


LOCKED = GLOO.replace(
    "    if not (",
    """
    if first and number == 5 and dist.get_rank() == 1:
        import ctypes
        ctypes.PyDLL(None).sleep(1000)
    if not (""",
)


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreter_lock_leaves_its_dump(tmp_path: Path) -> None:
    """Nothing in Python runs in it any more; torch's server tells what it has called, and nothing in the log of it."""
    with three_ranks(tmp_path, LOCKED) as launched:
        assert launched.wait(180) == exitcodes.OK
        hang = launched.event("hang_detected")
        assert hang["flight_recorder"] == {"culprits": [1], "cause": "never called", "confidence": 0.9}
        assert hang["rank"] == 1
        assert "Server" not in launched.log()


SERVER = """
import asyncio
async def serve():
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    await asyncio.sleep(14)
asyncio.run(serve())
"""


@pytest.mark.slow
def test_a_server_without_requests_is_left_alone(tmp_path: Path) -> None:
    """Its event loop does nothing for more than four times the limit."""
    with Launched(tmp_path, SERVER, "--nproc-per-node=2", "--idle-limit=3") as launched:
        assert launched.wait() == exitcodes.OK
        assert not launched.events("hang_detected")


# ``opsd launch`` on ranks that only wait for simulated GPUs: work is no hang, a kernel that spins is.


WAITS = """
import os, time
open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(1000)
"""


@pytest.mark.slow
def test_only_a_gpu_at_work_excuses_idle_processes(tmp_path: Path, library: str) -> None:
    """Neither rank uses the CPU, and the limit is 3 s; their GPUs work for 7 s, then the kernel of one waits."""
    with SimulatedGpus.create(tmp_path / "gpus", count=2) as gpus:
        flags = ("--nproc-per-node=2", "--no-standby", "--idle-limit=3")
        with Launched(tmp_path, WAITS, *flags, env=gpus.environment(Path(library))) as launched:
            files = [tmp_path / f"pid-{rank}" for rank in range(2)]
            assert eventually(lambda: all(file.exists() and file.read_text() for file in files), 60)
            for gpu, file in zip(gpus, files, strict=True):
                gpu.set_processes([(int(file.read_text()), 1 << 30)])
                gpu.load(utilization=100, power_watts=600)
            time.sleep(7.0)
            assert not launched.events("hang_detected")
            gpus[1].load(utilization=0, power_watts=100)
            gpus[0].memory_utilization = 0
            assert launched.wait() == exitcodes.OK
            (hang,) = launched.events("hang_detected")
            assert hang["rank"] == 1
            assert "GPU 1 runs no kernel" in hang["evidence"]


# A rank that cannot be ended, on the node of the leader: its launcher gives up, and the others go on.


HOLD = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206
assert libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), 0, 0) == 0, ctypes.get_errno()
print("held", flush=True)
time.sleep(1000)
"""
"""A tracer that does not look: what it holds stays a process after SIGKILL, as one that is stuck in the kernel does."""


def rank_of(nodes: Nodes, name: str) -> int:
    """The process of the rank on a node."""
    lines = (nodes.folder / name / "r/events.jsonl").read_text().splitlines()
    started = [event for line in lines if (event := json.loads(line))["event"] == "generation_started"]
    return int(started[-1]["ranks"][0]["pid"])


@pytest.mark.long
def test_a_leader_whose_rank_cannot_be_ended_makes_way(tmp_path: Path) -> None:
    """After 30 s it leaves, with a sentence; the spare takes its node's place, from the last checkpoint."""
    with Nodes(tmp_path, f"{TRAIN}\ntrain(100_000, step_s=0.02)", "--nnodes=2", "--spares=1", count=3) as nodes:
        nodes.until(lambda: all(nodes.state(name)["state"] in ("running", "spare") for name in nodes.names))
        leader = nodes.ask("n2", cmd="status")["head"]
        at_work = nodes.events("generation_started")[-1]["nodes"]
        assert leader in at_work
        pid = rank_of(nodes, leader)
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(pid)], stdout=subprocess.PIPE)
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            began = time.monotonic()
            assert nodes.ask(leader, cmd="restart") == {"ok": True}
            nodes.until(lambda: nodes.processes[leader].poll() is not None, 60)
            print(f"\nthe leader left after {time.monotonic() - began:.1f} s")
            assert nodes.processes[leader].returncode == exitcodes.FAILED
            assert f"rank 0 (pid {pid}) cannot be killed: stuck in the kernel" in nodes.said(leader)
            nodes.until(lambda: len(nodes.events("resumed")) == 1)
            assert set(nodes.events("generation_started")[-1]["nodes"]) == {"n3", *at_work} - {leader}
            print(f"the others went on after {time.monotonic() - began:.1f} s")
        finally:
            holder.kill()
            holder.communicate()
