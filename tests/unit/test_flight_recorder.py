"""Flight recorder dumps: who did not come to a collective, and who keeps the others waiting."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from opsd import exitcodes
from opsd.bench.outside import CULPRITS
from opsd.collectors.lib.nccl import desync
from opsd.collectors.lib.nccl.desync import Desync, Dump, DumpError, judge, parse_dump, read_dumps, shortened
from opsd.collectors.lib.sandbox import SMALL
from opsd.commands.diagnose import diagnose

# Flight recorder dumps: who did not come to the earliest collective that others wait in.


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


# Who keeps the others waiting: recorded hangs of others, and what pipelines, groups and programs can do wrong.


RECORDED = Path(__file__).parents[1] / "outside" / "fr_traces"

Entry = dict[str, object]


def desync_entry(
    record: int, operation: str = "all_reduce", group: str = "world", sequence: int = 7, **fields: object
) -> Entry:
    """An operation that has not ended."""
    return {
        "record_id": record, "collective_seq_id": sequence, "is_p2p": "->" in operation or "<-" in operation,
        "process_group": [group, f"the {group}"], "profiling_name": f"nccl:{operation}", "retired": False,
        "state": "scheduled", "time_created_ns": 1_000_000 + record, "input_sizes": [[16]], "output_sizes": [[16]],
        "input_dtypes": ["Float"], **fields,
    }  # fmt: skip


def desync_dump(*entries: Entry, **groups: list[int]) -> Dump:
    config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in groups.items()}
    return parse_dump(json.dumps({"version": "2.10", "entries": entries, "pg_config": config}).encode())


def judged(dumps: dict[int, Dump], world: int = 0) -> Desync:
    verdict = judge(dumps, frozenset(range(world)))
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(("case", "culprits"), CULPRITS.items())
def test_recorded_hangs_of_others(case: str, culprits: tuple[int, ...]) -> None:
    """The pickles that torch wrote on 16 GPUs, of which two failed or stood still."""
    dumps, unusable = read_dumps(RECORDED / case)
    assert (sorted(dumps), unusable) == (list(range(16)), {})
    verdict = judged(dumps)
    assert verdict.culprits == culprits
    assert verdict.cause == (desync.NEVER_CALLED if "gil" in case else desync.DEVICE)


def test_fewer_dumps_are_less_sure() -> None:
    """The culprit is still found without half of the others; what it rests on is said."""
    dumps, _ = read_dumps(RECORDED / "lock_gil_2nd")
    whole, part = judged(dumps), judged({rank: dumps[rank] for rank in (3, 8, 9, 10, 11, 12, 15)}, 16)
    assert part.culprits == whole.culprits
    assert part.confidence < whole.confidence


@pytest.mark.parametrize("rank", range(16))
def test_one_dump_alone_names_nobody(rank: int) -> None:
    """Fifteen ranks are as likely to be the culprit as they were before."""
    dumps, _ = read_dumps(RECORDED / "lock_gil_2nd")
    verdict = judge({rank: dumps[rank]}, frozenset(range(16)))
    assert verdict is None or (verdict.culprits, verdict.cause) == ((), desync.TOO_FEW)
    assert verdict is None or verdict.confidence <= 0.2


def test_the_one_rank_without_a_dump_is_named() -> None:
    """All others wait for it; also the other one of two."""
    group = {"world": [0, 1, 2, 3]}
    verdict = judged({rank: desync_dump(desync_entry(1), **group) for rank in (0, 1, 3)})
    assert (verdict.cause, verdict.culprits) == (desync.NO_DUMP, (2,))
    assert judged({0: desync_dump(desync_entry(1), world=[0, 1])}).culprits == (1,)


def test_a_pipeline_waits_for_the_stage_that_stopped() -> None:
    """Four stages: 0 and 1 wait for 2, which has called nothing; 3 waits for it too."""
    group = {"pp": [0, 10, 20, 30]}
    dumps = {
        0: desync_dump(desync_entry(5, "recv 0<-1", "pp"), **group),
        10: desync_dump(desync_entry(5, "send 1->0", "pp"), desync_entry(4, "recv 1<-2", "pp"), **group),
        20: desync_dump(**group),
        30: desync_dump(desync_entry(5, "recv 3<-2", "pp"), **group),
    }
    verdict = judged(dumps)
    assert (verdict.cause, verdict.culprits) == (desync.NEVER_CALLED, (20,))


def test_the_group_in_which_somebody_is_missing_is_blamed_not_the_first() -> None:
    """All are in the older all-gather of dp behind an operation of tp to which rank 3 has not come."""
    groups = {"dp": [0, 2], "tp": [2, 3]}
    dumps = {
        0: desync_dump(desync_entry(1, "_all_gather_base", "dp"), **groups),
        2: desync_dump(desync_entry(1, "all_reduce", "tp", 40), desync_entry(9, "_all_gather_base", "dp"), **groups),
        3: desync_dump(desync_entry(8, "all_reduce", "tp", 39, retired=True), **groups),
    }
    verdict = judged(dumps)
    assert (verdict.group, verdict.culprits, verdict.missing) == ("tp", (3,), (3,))


@pytest.mark.parametrize(
    "fields", [{"operation": "_all_gather_base"}, {"input_sizes": [[8]]}, {"input_dtypes": ["BFloat16"]}]
)
def test_a_rank_that_calls_something_else_is_named(fields: dict[str, object]) -> None:
    """Another operation, size or type at the same place."""
    usual, odd = desync_entry(1), desync_entry(1, **fields)  # type: ignore[arg-type]
    verdict = judged({rank: desync_dump(odd if rank == 2 else usual, world=[0, 1, 2, 3]) for rank in range(4)})
    assert (verdict.cause, verdict.culprits) == (desync.MISMATCHED, (2,))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_without_a_majority_all_are_named(backend: str) -> None:
    """Of two that call different operations neither is known to be right, also where calls have no states."""
    group = {"world": [0, 1]}
    calls = [desync_entry(0, profiling_name=f"{backend}:{operation}") for operation in ("broadcast", "all_reduce")]
    verdict = judged({rank: desync_dump(call, **group) for rank, call in enumerate(calls)})
    assert (verdict.cause, verdict.culprits) == (desync.MISMATCHED, (0, 1))
    assert verdict.called == f"rank 0 called {backend}:broadcast, rank 1 called {backend}:all_reduce"
    assert verdict.called in desync.evidence(verdict)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(
    ("called", "odd"),
    [
        (("all_reduce all_reduce all_reduce", "all_reduce all_reduce barrier"), {1}),
        (("all_reduce all_reduce barrier", "all_reduce all_reduce all_reduce"), {0}),
        (("all_reduce barrier all_reduce barrier all_reduce", "all_reduce barrier all_reduce barrier barrier"), {1}),
        (("all_reduce barrier", "all_reduce broadcast"), {0, 1}),
    ],
)
def test_without_a_majority_the_order_so_far_decides(called: tuple[str, str], odd: set[int], backend: str) -> None:
    """The rank whose call breaks the order of all earlier calls is odd; without such an order both are named."""
    ended = {"state": "completed", "retired": True} if backend == "nccl" else {}
    dumps = {}
    for rank, operations in enumerate(each.split() for each in called):
        last = len(operations) - 1
        entries = [
            desync_entry(at, sequence=at, profiling_name=f"{backend}:{name}", **(ended if at < last else {}))
            for at, name in enumerate(operations)
        ]
        dumps[rank] = desync_dump(*entries, world=[0, 1])
    verdict = judged(dumps)
    assert (verdict.cause, set(verdict.culprits)) == (desync.MISMATCHED, odd)


def test_the_operations_of_a_batch_are_over_when_its_frame_is() -> None:
    """Torch never updates the state of what batch_isend_irecv calls, but that of the frame it records after it."""
    groups = {"world": [0, 1, 2, 3], "pp0": [0, 1], "pp1": [2, 3]}

    def rank(number: int, *last: Entry) -> Dump:
        group, operation = f"pp{number // 2}", ("send 0->1", "recv 1<-0")[number % 2]
        batch = desync_entry(0, operation, group, 0, p2p_seq_id=1)
        frame = desync_entry(1, "coalesced", group, 0, p2p_seq_id=1, is_p2p=True, state="completed", retired=True)
        return desync_dump(batch, frame, *last, **groups)

    late = rank(2)
    verdict = judged({number: late if number == 2 else rank(number, desync_entry(2)) for number in range(4)})
    assert (verdict.cause, verdict.culprits, verdict.operation) == (desync.NEVER_CALLED, (2,), "nccl:all_reduce")


def test_a_batch_that_has_not_ended_is_waited_in() -> None:
    """Its operations have come as far as its frame; the rank at the other end has not called."""
    group = {"pp": [0, 1]}
    batch = desync_entry(0, "send 0->1", "pp", 0, p2p_seq_id=1)
    frame = desync_entry(1, "coalesced", "pp", 0, p2p_seq_id=1, is_p2p=True, state="started")
    verdict = judged({0: desync_dump(batch, frame, **group), 1: desync_dump(**group)})
    assert (verdict.cause, verdict.culprits) == (desync.NEVER_CALLED, (1,))


def test_sizes_may_differ_where_they_may() -> None:
    """Experts get different numbers of tokens."""
    dumps = {
        rank: desync_dump(desync_entry(1, "all_to_all", input_sizes=[[rank]]), world=[0, 1, 2]) for rank in range(3)
    }
    assert judged(dumps).cause == desync.BETWEEN


def test_two_groups_in_different_order_wait_for_each_other() -> None:
    """Rank 0 is in a and never came to b; rank 1 the other way round."""
    groups = {"a": [0, 1], "b": [0, 1]}
    verdict = judged(
        {0: desync_dump(desync_entry(1, group="a"), **groups), 1: desync_dump(desync_entry(1, group="b"), **groups)}
    )
    assert (verdict.cause, verdict.culprits) == (desync.DEADLOCK, (0, 1))


def test_a_device_that_does_not_end_what_others_have_ended() -> None:
    """Rank 1 has called everything, and its first operation is over elsewhere."""
    late = desync_dump(desync_entry(1, sequence=6), desync_entry(2), world=[0, 1, 2])
    waiting = desync_dump(desync_entry(1, sequence=6, retired=True), desync_entry(2), world=[0, 1, 2])
    verdict = judged({0: waiting, 1: late, 2: waiting})
    assert (verdict.cause, verdict.culprits) == (desync.DEVICE, (1,))


def test_thousands_of_ranks_are_judged(tmp_path: Path) -> None:
    """4,096 dumps, torch's pickles, with one rank that stands still: all of them count."""
    every = list(range(4096))
    config = {"world": {"name": "world", "desc": "", "ranks": str(every)}}
    for rank in every:
        node = [rank // 8 * 8 + place for place in range(8)]
        groups = {**config, f"n{node[0]}": {"name": f"n{node[0]}", "desc": "", "ranks": str(node)}}
        entries = [] if rank == 3333 else [desync_entry(1), desync_entry(2, "all_gather", f"n{node[0]}")]
        raw = {"version": "2.9", "entries": entries, "pg_config": groups if rank < 8 else {}}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(raw, protocol=2))
    began = time.monotonic()
    dumps, _ = read_dumps(tmp_path)
    assert judged(dumps).culprits == (3333,)
    assert time.monotonic() - began < 60  # 2.3 s on one core when nothing else runs


def test_a_pickle_that_refers_to_itself_a_million_times_is_bounded() -> None:
    """Thirty lists, each ten times in the next, would be 10**30 numbers as text."""
    nested: list[object] = [1]
    for _ in range(30):
        nested = [nested] * 10
    for field in ("input_sizes", "process_group", "profiling_name"):
        raw = {"entries": [desync_entry(1) | {field: nested}], "pg_config": {}}
        buffer = io.BytesIO()
        pickle.dump(raw, buffer, protocol=2)
        try:
            parse_dump(buffer.getvalue())
        except DumpError:
            assert field != "input_sizes"


def test_a_dump_of_many_groups_is_read_in_time_that_grows_with_their_number() -> None:
    """The agent reads what a program leaves: the ranks of all groups are counted once, not again for each group."""
    groups = {str(number): {"name": str(number), "ranks": "[0]"} for number in range(40_000)}
    content = json.dumps({"entries": [], "pg_config": groups}).encode()
    began = time.thread_time()
    assert len(parse_dump(content).members) == 40_000
    assert time.thread_time() - began < 2


def test_a_folder_of_dumps_on_the_command_line(tmp_path: Path) -> None:
    """Any program's folder: JSON with the culprits, or a sentence; what is no dump is named."""
    result = CliRunner().invoke(diagnose, ["--flight-recorder", str(RECORDED / "lock_gil_1st"), "--json", "-"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert (told["culprits"], told["cause"], told["confidence"]) == ([9, 14], "never called", 0.9)
    assert all(isinstance(fact, str) for fact in told["evidence"])
    result = CliRunner().invoke(diagnose, ["--flight-recorder", str(RECORDED / "gpu_error_2nd")])
    assert "look at ranks 9, 14: device does not go on" in result.output
    (tmp_path / "rank_0").write_text("nothing")
    result = CliRunner().invoke(diagnose, ["--flight-recorder", str(tmp_path)])
    assert result.exit_code == exitcodes.FAILED
    assert "rank_0 is not a flight recorder dump" in result.output


def test_two_dumps_of_one_rank_are_two_hangs(tmp_path: Path) -> None:
    """Judged together they would contradict each other."""
    for name in ("old_rank_3.json", "rank-0003.json"):
        (tmp_path / name).write_text('{"entries": []}')
    with pytest.raises(DumpError, match=r"old_rank_3.json and rank-0003.json are both of rank 3"):
        read_dumps(tmp_path)
