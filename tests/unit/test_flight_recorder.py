"""Flight recorder dumps: who did not come to the earliest collective that others wait in."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.lib.nccl.desync import judge
from opsd.collectors.lib.nccl.flight_recorder import Dump, DumpError, parse_dump, shortened
from opsd.collectors.lib.sandbox import SMALL

WORLD = frozenset(range(4))
DP, TP = ("0", "default_pg"), ("1", "tp")


def entry(sequence: int, state: str = "completed", group: tuple[str, str] = DP, **fields: object) -> dict[str, object]:
    """A collective as torch 2.13 dumps it; it is called in the order of its sequence number."""
    return {
        "collective_seq_id": sequence,
        "is_p2p": False,
        "process_group": list(group),
        "profiling_name": "nccl:all_reduce",
        "retired": state == "completed",
        "state": state,
        "time_created_ns": 1_000 + sequence,
        **fields,
    }


def waiting(group: str, shape: list[list[str]]) -> dict[str, object]:
    """A collective that has not ended, of tensors of this shape."""
    return entry(1, "started", (group, "g"), input_sizes=shape, input_dtypes=shape, output_sizes=shape)


def dump(*entries: dict[str, object]) -> Dump:
    """One rank's dump, parsed from its JSON."""
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "1": {"name": "1", "desc": "tp", "ranks": "[0, 1]"},
    }
    return parse_dump(json.dumps({"version": "2.10", "entries": list(entries), "pg_config": config}).encode())


@pytest.mark.parametrize(
    "content",
    [
        b'{"entries": [' + b"[]," * (SMALL // 3),
        b'{"entries": [' + b"{}," * (SMALL // 3),
        *(b"\x80\x04N" + code * SMALL for code in (b"]", b"}", b"\x94", b"(")),
        pickle.dumps({"entries": [waiting(str(group), [["y" * 60] * 8] * 8) for group in range(80)] * 100}),
        pickle.dumps({"entries": [waiting("0", [["y" * 30_000] * 8] * 8)]}),
    ],
    ids=["lists", "objects", "pickled lists", "pickled objects", "memo", "marks", "one shape in many calls", "a shape"],
)
def test_a_small_dump_takes_little_memory(content: bytes) -> None:
    """One of 800 kB that named a list in each call left 200 MiB in the agent; larger ones are read elsewhere."""
    tracemalloc.start()
    try:
        with contextlib.suppress(DumpError):
            assert len(content) < 2 * SMALL
            parse_dump(content)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_pickles_of_any_protocol_are_read() -> None:
    """Frames are only for speed; sets and arrays of bytes are in no dump."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert parse_dump(pickle.dumps({"entries": [entry(3)]}, protocol)).last == {"0": 3}
    for odd in ({1}, frozenset({1}), bytearray(5)):
        with pytest.raises(DumpError):
            parse_dump(pickle.dumps({"entries": [entry(3)], "odd": odd}, 5))


def test_the_rank_that_never_called_is_the_culprit() -> None:
    """Three ranks wait in collective 7, one has only come to 6."""
    waiting = dump(entry(6), entry(7, "started"))
    verdict = judge({0: waiting, 1: waiting, 2: dump(entry(6)), 3: waiting})
    assert verdict is not None
    assert (verdict.group, verdict.sequence, verdict.operation) == ("0", 7, "nccl:all_reduce")
    assert (verdict.missing, verdict.culprits, verdict.waiting) == ((2,), (2,), (0, 1, 3))


def test_the_culprit_often_cannot_write_a_dump() -> None:
    """With a partial set the silent rank is named, as having no dump and not as missing."""
    waiting = dump(entry(6), entry(7, "started"))
    verdict = judge({0: waiting, 1: waiting, 3: waiting})
    assert verdict is not None
    assert (verdict.missing, verdict.no_dump, verdict.culprits) == ((), (2,), (2,))


def test_a_rank_that_is_known_to_be_missing_is_blamed_before_a_silent_one() -> None:
    """What is known weighs more than what is not."""
    verdict = judge({0: dump(entry(7, "started")), 1: dump(entry(6))})
    assert verdict is not None
    assert (verdict.culprits, verdict.no_dump) == ((1,), (2, 3))


def test_a_device_that_has_not_begun_is_named() -> None:
    """All have called, but on one rank the kernel has not started: its device is busy with something else."""
    started, scheduled = dump(entry(7, "started")), dump(entry(7, "scheduled"))
    verdict = judge({0: started, 1: started, 2: started, 3: scheduled})
    assert verdict is not None
    assert (verdict.missing, verdict.not_started, verdict.culprits) == ((), (3,), (3,))


def test_all_in_it_and_nobody_finishes_is_nobodys_fault() -> None:
    """Every rank has started: the fault is between them."""
    started = dump(entry(7, "started"))
    verdict = judge(dict.fromkeys(WORLD, started))
    assert verdict is not None
    assert verdict.culprits == ()
    assert verdict.waiting == (0, 1, 2, 3)


def test_the_earliest_group_is_blamed() -> None:
    """Ranks 2 and 3 wait in the world for 0, which waits in its tensor-parallel group for 1."""
    early = entry(50, "started", TP, time_created_ns=1_000)
    late = entry(7, "started", time_created_ns=2_000)
    verdict = judge({0: dump(entry(6), early), 1: dump(entry(6)), 2: dump(entry(6), late), 3: dump(entry(6), late)})
    assert verdict is not None
    assert (verdict.group, verdict.sequence, verdict.culprits) == ("1", 50, (1,))


def test_what_the_ring_has_forgotten_is_over() -> None:
    """A rank whose oldest entry is younger has passed the collective."""
    behind = dump(entry(7, "started"))
    ahead = dump(entry(100), entry(101))
    verdict = judge({0: behind, 1: ahead, 2: ahead, 3: ahead})
    assert verdict is not None
    assert (verdict.sequence, verdict.missing) == (7, ())


def test_a_run_that_has_finished_everything_is_not_stuck() -> None:
    """No verdict without an incomplete collective, and none without dumps."""
    done = dump(entry(6), entry(7))
    assert judge(dict.fromkeys(WORLD, done)) is None
    assert judge({}) is None


def test_point_to_point_operations_are_left_out() -> None:
    """Only some ranks call them, by design."""
    lonely = dump(entry(6), entry(7, "started", is_p2p=True))
    assert judge({rank: lonely if rank == 0 else dump(entry(6)) for rank in WORLD}) is None


@given(st.integers(1, 40), st.integers(2, 16), st.data())
def test_whoever_stops_first_is_named(steps: int, ranks: int, data: st.DataObject) -> None:
    """Whatever subset of ranks stops after its n-th collective, exactly these are missing from the next one."""
    late = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1))
    calls = [
        {"collective_seq_id": n, "process_group": ["x", ""], "profiling_name": "gloo:all_reduce"} for n in range(steps)
    ]
    for call in calls:
        call |= {"state": "scheduled", "time_created_ns": call["collective_seq_id"]}
    full = parse_dump(json.dumps({"entries": calls}).encode())
    short = parse_dump(json.dumps({"entries": calls[:-1], "pg_config": {}}).encode())
    verdict = judge({rank: short if rank in late else full for rank in range(ranks)}, frozenset(range(ranks)))
    assert verdict is not None
    assert (verdict.sequence, set(verdict.missing)) == (steps - 1, late)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    """PyTorch's own dump files are pickles; loading one would run what its writer wants."""

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    with pytest.raises(DumpError, match=r"a pickle that asks for posix\.mkdir"):
        parse_dump(pickle.dumps({"entries": Trap()}))
    assert not (tmp_path / "sprung").exists()


WHOLE = json.dumps({"entries": [entry(7)], "pg_config": {"0": {"name": "0", "ranks": "[0]"}}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"entries": 3}',
        b'{"entries": [{}]}',
        b'{"entries": [{"process_group": [], "collective_seq_id": 1}]}',
        b'{"entries": [], "pg_config": {"0": {"name": "0", "ranks": "__import__(\'os\')"}}}',
        b'{"entries": [], "pg_config": {"0": {"name": "0", "ranks": "[0, 1"}}}',
        b'{"entries": [], "pg_config": {"0": {"name": "0", "ranks": ""}}}',
        b'{"entries": [], "pg_config": {"0": {"name": "0", "ranks": [Infinity]}}}',
        WHOLE.replace(b"all_reduce", b"\\ud800"),
        b"[" * 100_000,
        pytest.param(pickle.dumps({"entries": [entry(1 << 20_000)]}), id="sequence"),
        pickle.dumps({"entries": [entry(-1)]}),
        pytest.param(
            pickle.dumps({"entries": [], "pg_config": {"0": {"name": "0", "ranks": [0, 1 << 20_000]}}}), id="rank"
        ),
        *(WHOLE[:cut] for cut in range(1, len(WHOLE), 23)),
    ],
)
def test_malformed_dumps_are_refused_in_one_sentence(content: bytes) -> None:
    """Half a dump, another form, or code where ranks should be."""
    with pytest.raises(DumpError) as caught:
        parse_dump(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_ends_anywhere_is_refused(protocol: int) -> None:
    """As the dump of a rank that was killed while it wrote it, or whose disk was full."""
    raw = {"version": "2.10", "entries": [entry(70_000) | {"time": 1.5}]}
    whole = pickle.dumps(raw, protocol)
    assert parse_dump(whole).last
    for length in range(len(whole)):
        with pytest.raises(DumpError):
            parse_dump(whole[:length])


RANK = """
import os, sys, time, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
tensor = torch.ones(1)
for _ in range(3):
    dist.all_reduce(tensor)
if rank == 0:
    dist.all_reduce(tensor, async_op=True)
with open(f"{folder}/rank-{rank}.json", "wb") as file:
    file.write(_dump_fr_trace_json(True, False))
time.sleep(1)
os._exit(0)
"""


@pytest.mark.slow
def test_dumps_of_the_installed_torch_are_read(tmp_path: Path) -> None:
    """Two real ranks on gloo: rank 0 has called a fourth all-reduce, rank 1 has not."""
    pytest.importorskip("torch", reason="torch is not installed")
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], env=env) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    verdict = judge({rank: parse_dump((tmp_path / f"rank-{rank}.json").read_bytes()) for rank in range(2)})
    assert verdict is not None
    assert (verdict.sequence, verdict.operation, verdict.missing) == (4, "gloo:all_reduce", (1,))


NAMES = ("nccl:all_reduce", "nccl:coalesced", "nccl:send 0->1", "nccl:recv 0<-1", "gloo:barrier")
ENTRIES = st.lists(
    st.builds(
        lambda sequence, state, group, name, p2p, retired, record: entry(
            sequence, state, group, profiling_name=name, is_p2p=p2p, p2p_seq_id=sequence, retired=retired,
            record_id=record, time_created_ns=1_000 + record,
        ),
        st.integers(0, 5), st.sampled_from(("completed", "started", "scheduled")), st.sampled_from((DP, TP)),
        st.sampled_from(NAMES), st.booleans(), st.booleans(), st.integers(0, 40),
    ),
    max_size=12,
)  # fmt: skip


@given(ENTRIES)
def test_a_short_dump_says_the_same(entries: list[dict[str, object]]) -> None:
    """Batches with and without their frames, calls that have ended and those that have not, several groups."""
    whole = json.dumps({"version": "2.10", "entries": entries, "pg_config": {}, "more": 1}).encode()
    assert parse_dump(shortened(whole)) == parse_dump(whole)


def test_a_full_ring_is_short_if_little_is_under_way() -> None:
    """Of two thousand calls the oldest, the last and the one before it remain."""
    ring = [entry(number, "completed" if number < 1999 else "started", record_id=number) for number in range(2000)]
    short = json.loads(shortened(json.dumps({"entries": ring, "pg_config": {}}).encode()))
    assert [one["collective_seq_id"] for one in short["entries"]] == [0, 1998, 1999]
    with pytest.raises(DumpError):
        shortened(b"{}")
