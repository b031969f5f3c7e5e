"""What users wrote, read in a process of its own: what it takes is limited by the kernel, and users take turns."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from threading import Semaphore

import pytest

from opsd.collectors.lib.apart import MAX_RESULT, SMALL, Apart, ApartError, here, in_a_process
from opsd.collectors.lib.nccl.flight_recorder import parse_dump, restored
from opsd.collectors.lib.nccl.ras import parse_status
from opsd.collectors.lib.nccl.ras import restored as restored_status
from tests.fakes.ras import ras_json, ras_rank

DUMP = "opsd.collectors.lib.nccl.flight_recorder:parse_dump"
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
    except ApartError as error:
        assert "\n" not in str(error) and str(error)
    assert highest_mib() < before + 32


def highest_mib() -> float:
    """The most memory that this process has had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def test_an_answer_has_a_most() -> None:
    """As what it tells is kept."""
    entries = [entry(number, process_group=[f"{number:060}", "x"]) for number in range(30_000)]
    with pytest.raises(ApartError, match=f"more than {MAX_RESULT >> 20} MiB"):
        in_a_process(DUMP, json.dumps({"entries": entries}).encode())


def test_why_it_cannot_be_used_is_told() -> None:
    """In the words of the function."""
    with pytest.raises(ApartError, match="not a flight recorder dump, or half of one"):
        in_a_process(DUMP, b"x" * (SMALL + 1))


@pytest.fixture
def turns() -> Iterator[tuple[Apart, list[bytes], Semaphore]]:
    """What is read, in its order, each time that the semaphore lets something through."""
    done: list[bytes] = []
    go = Semaphore(0)

    def work(_function: str, content: bytes | bytearray) -> tuple[str, float]:
        assert go.acquire(timeout=30)
        done.append(bytes(content[:1]))
        return "null", 0.0

    yield Apart(work, work), done, go
    go.release(1000)


@pytest.mark.parametrize("size", [1, SMALL + 1])
def test_a_user_without_end_delays_another_by_one(turns: tuple[Apart, list[bytes], Semaphore], size: int) -> None:
    """A hundred of A's largest wait; B's comes after the one that is read, and one more at most."""
    apart, done, go = turns
    endless = [apart.parse(1, DUMP, b"A" * size) for _ in range(100)]
    last = apart.parse(2, DUMP, b"B" * size)
    go.release(3)
    assert last.result(30) is None
    assert done.index(b"B") <= 2
    assert not endless[50].done()


def test_small_ones_do_not_wait_for_large_ones(turns: tuple[Apart, list[bytes], Semaphore]) -> None:
    """They are read here, beside the process."""
    done = Semaphore(0)

    def large(_function: str, _content: bytes | bytearray) -> tuple[str, float]:
        assert done.acquire(timeout=30)
        return "null", 0.0

    apart = Apart(large)
    waits = apart.parse(1, DUMP, bytes(SMALL + 1))
    assert restored(apart.parse(1, DUMP, of_dump()).result(30)).calls
    assert not waits.done()
    done.release()
    assert waits.result(30) is None


def test_one_at_a_time(turns: tuple[Apart, list[bytes], Semaphore]) -> None:
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
    apart = Apart(lambda _function, _content: ("null", 1000.0))
    assert apart.parse(1, DUMP, bytes(SMALL + 1)).result(30) is None
    waits = apart.parse(2, DUMP, bytes(SMALL + 1))
    assert restored(apart.parse(1, DUMP, of_dump()).result(30)).calls
    assert not waits.done()


def test_what_is_cancelled_is_left_out(turns: tuple[Apart, list[bytes], Semaphore]) -> None:
    """Nobody waits for it any more."""
    apart, done, go = turns
    first, second, third = (apart.parse(1, DUMP, mark * (SMALL + 1)) for mark in (b"1", b"2", b"3"))
    second.cancel()
    go.release(2)
    assert third.result(30) is None and first.done()
    assert done == [b"1", b"3"]
