"""``opsd launch`` on programs that report nothing: hangs are named by what processes do, and by flight recorders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.launched import Launched

pytestmark = pytest.mark.slow

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


def test_a_server_without_requests_is_left_alone(tmp_path: Path) -> None:
    """Its event loop does nothing for more than four times the limit."""
    with Launched(tmp_path, SERVER, "--nproc-per-node=2", "--idle-limit=3") as launched:
        assert launched.wait() == exitcodes.OK
        assert not launched.events("hang_detected")
