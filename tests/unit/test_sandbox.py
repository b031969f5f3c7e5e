"""What users wrote, read in a process of its own: what it takes is limited by the kernel, and users take turns."""

from __future__ import annotations

import json
import pickle
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore

import psutil
import pytest

from opsd.collectors.lib.nccl.desync import parse_dump, restored
from opsd.collectors.lib.nccl.ras import parse_status
from opsd.collectors.lib.nccl.ras import restored as restored_status
from opsd.collectors.lib.sandbox import (
    MAX_RESULT,
    MEMORY,
    PROCESSOR_S,
    SMALL,
    Sandbox,
    SandboxError,
    here,
    in_a_process,
)
from opsd.collectors.lib.shares import Spent
from opsd.confined import confine
from tests.fakes.clock import eventually
from tests.fakes.ras import ras_json, ras_rank

DUMP = "opsd.collectors.lib.nccl.desync:parse_dump"
RAS = "opsd.collectors.lib.nccl.ras:parse_status"
GREETING = "SERVER PROTOCOL 2\n"
WIDE = "\U0001f600"
"""A text with this takes four bytes for each character."""


def entry(number: int, **fields: object) -> dict[str, object]:
    """A collective that has not ended."""
    return {
        "profiling_name": "nccl:all_reduce", "state": "started", "time_created_ns": number, "record_id": number,
        "collective_seq_id": number, "process_group": ["0", "x"], **fields,
    }  # fmt: skip


def of_dump(**fields: object) -> bytes:
    """A dump of a send that waits, in a group of two."""
    call = entry(7, is_p2p=True, profiling_name="nccl:send 0->1", input_sizes=[[4, 4]], **fields)
    return json.dumps({"entries": [entry(6), call], "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}}}).encode()


@pytest.mark.parametrize("work", [here, in_a_process])
def test_what_comes_back_is_the_same_as_here(work: object) -> None:
    """JSON has neither tuples nor classes."""
    assert callable(work)
    assert restored(json.loads(work(DUMP, of_dump())[0])) == parse_dump(of_dump())
    answer = ras_json([ras_rank(0, {"AllReduce": 2}), ras_rank(1, {"AllReduce": 1})]).encode()
    assert restored_status(json.loads(work(RAS, answer)[0])) == parse_status(answer)


@pytest.mark.parametrize(
    "function, content",
    [
        (DUMP, b'{"entries": [' + b"[]," * 2_700_000 + b"[]]}"),
        (DUMP, f'{{"entries": [{"[]," * 2_000_000}"{WIDE}"]}}'.encode()),
        (DUMP, b"\x80\x04N" + b"]" * 8_000_000),
        (DUMP, b"\x80\x04N" + b"(" * 8_000_000),
        (DUMP, pickle.dumps({"entries": [entry(1, input_sizes=[["y" * 1_000_000] * 8] * 8)]}) + b"."),
        (RAS, (GREETING + '{"communicators": [' + "[]," * 6_000_000 + "[]]}").encode()),
        (RAS, (GREETING + f'{{"{WIDE}": 1,' + ' "nvml_dev": 1 "status"' * 800_000).encode()),
        (RAS, (GREETING + "NCCL version 2.2\nWarnings\n" + "\n" * 15_000_000 + WIDE).encode()),
    ],
)
def test_what_stands_for_more_than_the_memory_takes_none_here(function: str, content: bytes) -> None:
    """20 MB of RAS with one character of four bytes took 313 MiB of the agent, within all limits that there were."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = highest_mib()
    try:
        in_a_process(function, content)
    except SandboxError as error:
        assert "\n" not in str(error) and str(error)
    assert highest_mib() < before + 32


def highest_mib() -> float:
    """The most memory that this process has had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def test_an_answer_has_a_most() -> None:
    """As what it tells is kept."""
    entries = [entry(number, process_group=[f"{number:060}", "x"]) for number in range(30_000)]
    with pytest.raises(SandboxError, match=f"more than {MAX_RESULT >> 20} MiB"):
        in_a_process(DUMP, json.dumps({"entries": entries}).encode())


def test_whatever_it_says_is_no_longer_than_that() -> None:
    """Also where it has been taken over, and writes as much as the agent takes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = highest_mib()
    with pytest.raises(SandboxError):
        in_a_process("builtins:eval", b"[__import__('os').write(1, bytes(1 << 20)) for _ in range(64)]")
    assert highest_mib() < before + 32


def test_why_it_cannot_be_used_is_told() -> None:
    """In the words of the function."""
    with pytest.raises(SandboxError, match="not a flight recorder dump, or half of one"):
        in_a_process(DUMP, b"x" * (SMALL + 1))


@pytest.fixture
def turns() -> Iterator[tuple[Sandbox, list[bytes], Semaphore]]:
    """What is read, in its order, each time that the semaphore lets something through."""
    done: list[bytes] = []
    go = Semaphore(0)

    def work(_function: str, content: bytes | bytearray) -> tuple[str, float]:
        assert go.acquire(timeout=30)
        done.append(bytes(content[:1]))
        return "null", 0.0

    yield Sandbox(work, work), done, go
    go.release(1000)


@pytest.mark.parametrize("size", [1, SMALL + 1])
def test_a_user_without_end_delays_another_by_one(turns: tuple[Sandbox, list[bytes], Semaphore], size: int) -> None:
    """A hundred of A's largest wait; B's comes after the one that is read, and one more at most."""
    apart, done, go = turns
    endless = [apart.parse(1, DUMP, b"A" * size) for _ in range(100)]
    last = apart.parse(2, DUMP, b"B" * size)
    go.release(3)
    assert last.result(30) is None
    assert done.index(b"B") <= 2
    assert not endless[50].done()


def test_who_takes_little_waits_for_nobody_but_one() -> None:
    """A dozen users write what takes long, without end; each piece of another's comes after the one that is read."""
    done, go, begun = list[bytes](), Semaphore(0), Semaphore(0)

    def work(_function: str, content: bytes | bytearray) -> tuple[str, float]:
        begun.release()
        assert go.acquire(timeout=30)
        done.append(bytes(content[:1]))
        return "null", 0.1 if content.startswith(b"A") else 0.001

    apart = Sandbox(work)
    for user in range(1, 13):
        for _ in range(10):
            apart.parse(user, DUMP, b"A" * (SMALL + 1))
    go.release(12)
    for _ in range(13):  # the last of these goes on
        assert begun.acquire(timeout=30)
    for turn in range(1, 4):
        waits = apart.parse(20, DUMP, b"B" * (SMALL + 1))
        go.release(2)
        assert waits.result(30) is None
        assert begun.acquire(timeout=30) and begun.acquire(timeout=30)
        assert done[12:] == [b"A", b"B"] * turn
    go.release(1000)


def test_whose_processes_hold_a_gpu_comes_first() -> None:
    """A user may have thousands of user ids, in a user namespace, each of which has taken nothing yet."""
    done, go = list[bytes](), Semaphore(0)

    def work(_function: str, content: bytes | bytearray) -> tuple[str, float]:
        assert go.acquire(timeout=30)
        done.append(bytes(content[:1]))
        return "null", 0.1

    apart = Sandbox(work, first=lambda: {1})
    go.release(1)
    assert apart.parse(1, DUMP, b"G" * (SMALL + 1)).result(30) is None
    all_of_them = [apart.parse(user, DUMP, b"A" * (SMALL + 1)) for user in range(10, 15)]
    all_of_them.append(apart.parse(1, DUMP, b"G" * (SMALL + 1)))
    go.release(6)
    assert [one.result(30) for one in all_of_them] == [None] * 6
    assert done.index(b"G", 1) <= 2


def test_what_a_user_has_taken_is_forgotten() -> None:
    """By half in a time, and whole users after some of them."""
    now = 0.0
    spent = Spent(10.0, lambda: now)
    spent.add("a", 8.0)
    now = 20.0
    assert (spent("a"), spent("b")) == (2.0, 0.0)
    spent.add("b", 1.0)
    now = 500.0
    spent.add("b", 1.0)
    assert spent("a") == 0.0 < spent("b")


def test_a_process_takes_seconds_of_a_processor() -> None:
    """The kernel ends it then, also when nobody is left who would: it ran on after the end of its agent."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        confine(process, MEMORY, 1)
        assert process.wait(120) == -signal.SIGKILL


def test_the_process_that_reads_has_these_limits() -> None:
    """Processor time, memory and the length of its answer, as the kernel has them."""

    def children() -> list[psutil.Process]:
        return [one for one in psutil.Process().children() if "opsd.collectors.lib.sandbox" in one.cmdline()]

    def limits() -> dict[str, int]:
        (child,) = children()
        lines = Path(f"/proc/{child.pid}/limits").read_text().splitlines()[1:]
        return {line[:26].strip(): int(word) for line in lines if (word := line[26:47].strip()).isdigit()}

    wanted = {"Max cpu time": PROCESSOR_S, "Max data size": MEMORY}
    with ThreadPoolExecutor(1) as pool:
        reads = pool.submit(in_a_process, "builtins:eval", b"any(iter(int, 1))")
        assert eventually(lambda: bool(children()))
        assert eventually(lambda: wanted.items() <= limits().items())
        assert eventually(lambda: MAX_RESULT <= limits().get("Max file size", 0) <= MAX_RESULT + 64)
        children()[0].kill()
        with pytest.raises(SandboxError, match=f"more than {MEMORY >> 20} MiB, or than {PROCESSOR_S} s of a processor"):
            reads.result(60)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter is known for this machine")
@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        ("open('{file}')", "Errno 1"),
        ("os.remove('{file}')", "Errno 1"),
        ("os.chmod('{file}', 0)", "Errno 1"),
        ("os.pipe()", "Errno 1"),
        ("os.fork()", "Errno 1"),
        ("os.execv('/bin/true', ['true'])", "Errno 1"),
        ("os.kill(os.getppid(), 0)", "Errno 1"),
        ("{{}}[ctypes.CDLL(None).socket(2, 1, 0)]", "-1"),
        ("{{}}[ctypes.CDLL(None).socket(1, 1, 0)]", "-1"),
    ],
)
def test_what_reads_for_users_can_do_nothing_else(tmp_path: Path, attempt: str, said: str) -> None:
    """Though it is of the agent's user and has its capabilities: whoever takes it over has what it has open."""
    file = tmp_path / "kept"
    file.write_text("x")
    modules = "".join(f"{name} := __import__({name!r}), " for name in ("os", "ctypes"))
    with pytest.raises(SandboxError, match=said):
        in_a_process("builtins:eval", f"[{modules}{attempt.format(file=file)}]".encode())
    assert file.read_text() == "x"


def test_small_ones_do_not_wait_for_large_ones(turns: tuple[Sandbox, list[bytes], Semaphore]) -> None:
    """They are read here, beside the process."""
    done = Semaphore(0)

    def large(_function: str, _content: bytes | bytearray) -> tuple[str, float]:
        assert done.acquire(timeout=30)
        return "null", 0.0

    apart = Sandbox(large)
    waits = apart.parse(1, DUMP, bytes(SMALL + 1))
    assert restored(apart.parse(1, DUMP, of_dump()).result(30)).calls
    assert not waits.done()
    done.release()
    assert waits.result(30) is None


def test_one_at_a_time(turns: tuple[Sandbox, list[bytes], Semaphore]) -> None:
    """What they take does not add up."""
    apart, done, go = turns
    several = [apart.parse(user, DUMP, bytes(SMALL + 1)) for user in range(4)]
    go.release(1)
    several[0].result(30)
    assert len(done) == 1
    go.release(3)
    assert [one.result(30) for one in several] == [None] * 4


def test_what_takes_long_is_paid_for() -> None:
    """A thousand seconds of processor time are as many at rest and more, in which small ones are read."""
    apart = Sandbox(lambda _function, _content: ("null", 1000.0))
    assert apart.parse(1, DUMP, bytes(SMALL + 1)).result(30) is None
    waits = apart.parse(2, DUMP, bytes(SMALL + 1))
    assert restored(apart.parse(1, DUMP, of_dump()).result(30)).calls
    assert not waits.done()


def test_what_is_cancelled_is_left_out(turns: tuple[Sandbox, list[bytes], Semaphore]) -> None:
    """Nobody waits for it any more."""
    apart, done, go = turns
    first, second, third = (apart.parse(1, DUMP, mark * (SMALL + 1)) for mark in (b"1", b"2", b"3"))
    second.cancel()
    go.release(2)
    assert third.result(30) is None and first.done()
    assert done == [b"1", b"3"]
