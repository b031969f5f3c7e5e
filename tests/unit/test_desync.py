"""Who keeps the others waiting: recorded hangs of others, and what pipelines, groups and programs can do wrong."""

from __future__ import annotations

import io
import json
import pickle
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.bench.outside.flight_recorder import CULPRITS
from opsd.collectors.lib.nccl import desync
from opsd.collectors.lib.nccl.desync import Desync, judge
from opsd.collectors.lib.nccl.flight_recorder import Dump, DumpError, parse_dump, read_dumps
from opsd.commands.diagnose import diagnose

RECORDED = Path(__file__).parents[1] / "outside" / "fr_traces"

Entry = dict[str, object]


def entry(
    record: int, operation: str = "all_reduce", group: str = "world", sequence: int = 7, **fields: object
) -> Entry:
    """An operation that has not ended."""
    return {
        "record_id": record, "collective_seq_id": sequence, "is_p2p": "->" in operation or "<-" in operation,
        "process_group": [group, f"the {group}"], "profiling_name": f"nccl:{operation}", "retired": False,
        "state": "scheduled", "time_created_ns": 1_000_000 + record, "input_sizes": [[16]], "output_sizes": [[16]],
        "input_dtypes": ["Float"], **fields,
    }  # fmt: skip


def dump(*entries: Entry, **groups: list[int]) -> Dump:
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
    verdict = judged({rank: dump(entry(1), **group) for rank in (0, 1, 3)})
    assert (verdict.cause, verdict.culprits) == (desync.NO_DUMP, (2,))
    assert judged({0: dump(entry(1), world=[0, 1])}).culprits == (1,)


def test_a_pipeline_waits_for_the_stage_that_stopped() -> None:
    """Four stages: 0 and 1 wait for 2, which has called nothing; 3 waits for it too."""
    group = {"pp": [0, 10, 20, 30]}
    dumps = {
        0: dump(entry(5, "recv 0<-1", "pp"), **group),
        10: dump(entry(5, "send 1->0", "pp"), entry(4, "recv 1<-2", "pp"), **group),
        20: dump(**group),
        30: dump(entry(5, "recv 3<-2", "pp"), **group),
    }
    verdict = judged(dumps)
    assert (verdict.cause, verdict.culprits) == (desync.NEVER_CALLED, (20,))


def test_the_group_in_which_somebody_is_missing_is_blamed_not_the_first() -> None:
    """All are in the older all-gather of dp behind an operation of tp to which rank 3 has not come."""
    groups = {"dp": [0, 2], "tp": [2, 3]}
    dumps = {
        0: dump(entry(1, "_all_gather_base", "dp"), **groups),
        2: dump(entry(1, "all_reduce", "tp", 40), entry(9, "_all_gather_base", "dp"), **groups),
        3: dump(entry(8, "all_reduce", "tp", 39, retired=True), **groups),
    }
    verdict = judged(dumps)
    assert (verdict.group, verdict.culprits, verdict.missing) == ("tp", (3,), (3,))


@pytest.mark.parametrize(
    "fields", [{"operation": "_all_gather_base"}, {"input_sizes": [[8]]}, {"input_dtypes": ["BFloat16"]}]
)
def test_a_rank_that_calls_something_else_is_named(fields: dict[str, object]) -> None:
    """Another operation, size or type at the same place."""
    usual, odd = entry(1), entry(1, **fields)  # type: ignore[arg-type]
    verdict = judged({rank: dump(odd if rank == 2 else usual, world=[0, 1, 2, 3]) for rank in range(4)})
    assert (verdict.cause, verdict.culprits) == (desync.MISMATCHED, (2,))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_without_a_majority_all_are_named(backend: str) -> None:
    """Of two that call different operations neither is known to be right, also where calls have no states."""
    group = {"world": [0, 1]}
    calls = [entry(0, profiling_name=f"{backend}:{operation}") for operation in ("broadcast", "all_reduce")]
    verdict = judged({rank: dump(call, **group) for rank, call in enumerate(calls)})
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
            entry(at, sequence=at, profiling_name=f"{backend}:{name}", **(ended if at < last else {}))
            for at, name in enumerate(operations)
        ]
        dumps[rank] = dump(*entries, world=[0, 1])
    verdict = judged(dumps)
    assert (verdict.cause, set(verdict.culprits)) == (desync.MISMATCHED, odd)


def test_the_operations_of_a_batch_are_over_when_its_frame_is() -> None:
    """Torch never updates the state of what batch_isend_irecv calls, but that of the frame it records after it."""
    groups = {"world": [0, 1, 2, 3], "pp0": [0, 1], "pp1": [2, 3]}

    def rank(number: int, *last: Entry) -> Dump:
        group, operation = f"pp{number // 2}", ("send 0->1", "recv 1<-0")[number % 2]
        batch = entry(0, operation, group, 0, p2p_seq_id=1)
        frame = entry(1, "coalesced", group, 0, p2p_seq_id=1, is_p2p=True, state="completed", retired=True)
        return dump(batch, frame, *last, **groups)

    late = rank(2)
    verdict = judged({number: late if number == 2 else rank(number, entry(2)) for number in range(4)})
    assert (verdict.cause, verdict.culprits, verdict.operation) == (desync.NEVER_CALLED, (2,), "nccl:all_reduce")


def test_a_batch_that_has_not_ended_is_waited_in() -> None:
    """Its operations have come as far as its frame; the rank at the other end has not called."""
    group = {"pp": [0, 1]}
    batch = entry(0, "send 0->1", "pp", 0, p2p_seq_id=1)
    frame = entry(1, "coalesced", "pp", 0, p2p_seq_id=1, is_p2p=True, state="started")
    verdict = judged({0: dump(batch, frame, **group), 1: dump(**group)})
    assert (verdict.cause, verdict.culprits) == (desync.NEVER_CALLED, (1,))


def test_sizes_may_differ_where_they_may() -> None:
    """Experts get different numbers of tokens."""
    dumps = {rank: dump(entry(1, "all_to_all", input_sizes=[[rank]]), world=[0, 1, 2]) for rank in range(3)}
    assert judged(dumps).cause == desync.BETWEEN


def test_two_groups_in_different_order_wait_for_each_other() -> None:
    """Rank 0 is in a and never came to b; rank 1 the other way round."""
    groups = {"a": [0, 1], "b": [0, 1]}
    verdict = judged({0: dump(entry(1, group="a"), **groups), 1: dump(entry(1, group="b"), **groups)})
    assert (verdict.cause, verdict.culprits) == (desync.DEADLOCK, (0, 1))


def test_a_device_that_does_not_end_what_others_have_ended() -> None:
    """Rank 1 has called everything, and its first operation is over elsewhere."""
    late = dump(entry(1, sequence=6), entry(2), world=[0, 1, 2])
    waiting = dump(entry(1, sequence=6, retired=True), entry(2), world=[0, 1, 2])
    verdict = judged({0: waiting, 1: late, 2: waiting})
    assert (verdict.cause, verdict.culprits) == (desync.DEVICE, (1,))


def test_thousands_of_ranks_are_judged(tmp_path: Path) -> None:
    """4,096 dumps, torch's pickles, with one rank that stands still: all of them count."""
    every = list(range(4096))
    config = {"world": {"name": "world", "desc": "", "ranks": str(every)}}
    for rank in every:
        node = [rank // 8 * 8 + place for place in range(8)]
        groups = {**config, f"n{node[0]}": {"name": f"n{node[0]}", "desc": "", "ranks": str(node)}}
        entries = [] if rank == 3333 else [entry(1), entry(2, "all_gather", f"n{node[0]}")]
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
        raw = {"entries": [entry(1) | {field: nested}], "pg_config": {}}
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
