"""The NCCL collector on run folders, with a RAS server of its own."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from opsd.collectors.base import Event, NoData, Reading
from opsd.collectors.lib.nccl.run import LogMessage, parse_line
from opsd.collectors.lib.sandbox import Sandbox
from opsd.collectors.nccl import METRICS, NcclCollector, RasWatch
from tests.fakes.ras import FakeRas, missing_rank, ras_json, ras_rank

OWN = frozenset({os.geteuid()})
REFUSED = (("127.0.0.1", 1),)
WARN = b"node-1:4242:4250 [3] transport/net_ib.cc:905 NCCL WARN NET/IB: Got async event : port error\n"
TIMEOUT = (
    b"[rank3]:[E1121 00:00:00] [PG ID 0 PG GUID 0(default_pg) Rank 3] Watchdog caught collective operation timeout: "
    b"WorkNCCL(SeqNum=171, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600021 milliseconds\n"
)


class Node:
    """A node with one run: its folder in shared memory and its run folder."""

    def __init__(self, path: Path, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.root = path / "shm"
        self.folder = path / "runs/r1"
        self.memory = self.root / "r1"
        self.memory.mkdir(parents=True)
        for rank in ranks:
            (self.memory / f"rank-{rank:04d}.page").touch()
        self.start_generation(1)
        self.collector = self.agent()

    def agent(self) -> NcclCollector:
        """A collector as a newly started agent has it."""
        return NcclCollector(self.root, addresses=REFUSED, wall=lambda: 1000.0)

    def start_generation(self, generation: int) -> None:
        """The launcher starts a generation of ranks with fresh logs."""
        self.logs = self.folder / f"logs/gen-{generation:04d}"
        self.logs.mkdir(parents=True)
        run = {
            "run": "r1", "job": "7", "node": "n1", "state": "running", "generation": generation, "launcher_pid": 1,
            "launcher_start": 1, "world_size": 4, "control": "", "folder": str(self.folder),
        }  # fmt: skip
        (self.memory / "run.json").write_text(json.dumps(run))

    def log(self, rank: int, line: bytes) -> None:
        """A rank writes a line."""
        with (self.logs / f"rank-{rank:04d}.log").open("ab") as file:
            file.write(line)

    def dump(self, rank: int, content: bytes) -> None:
        """A rank writes a flight recorder dump."""
        (self.folder / "flight_recorder").mkdir(exist_ok=True)
        (self.folder / f"flight_recorder/rank-{rank:04d}.json").write_bytes(content)

    def collect(self) -> Reading:
        """One collection that has something to tell."""
        reading = self.collector.collect()
        assert isinstance(reading, Reading)
        return reading


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node whose agent was there before the run wrote anything."""
    node = Node(tmp_path)
    node.collect()
    return node


def values(reading: Reading) -> dict[tuple[str, ...], float]:
    """The samples by name and labels."""
    return {(sample.metric.name, *sample.labels): sample.value for sample in reading.samples}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (WARN, LogMessage("warning", "NET/IB: Got async event : port error")),
        (b"step 7 loss 2.1\n", None),
        (b"node-1:1:1 [0] NCCL INFO Connected all rings\n", None),
        (b"RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error\n", LogMessage(
            "error", "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error")),
        (b"ncclRemoteError: A call failed possibly due to a network error\n", LogMessage(
            "error", "ncclRemoteError: A call failed possibly due to a network error")),
        (b"a NCCL WARN \x1b[31mred\xff\n", LogMessage("warning", "[31mred�")),
    ],
)  # fmt: skip
def test_lines_of_a_log(line: bytes, message: LogMessage | None) -> None:
    """Warnings and errors are found, everything else is not, and control characters do not get through."""
    assert parse_line(line.rstrip(b"\n")) == message


def test_a_number_without_end_is_no_message() -> None:
    """A user's line must not end the reading of all the others."""
    assert parse_line(TIMEOUT.replace(b"171", b"9" * 5000)) is None


def test_a_collective_that_timed_out_is_named() -> None:
    """Operation and sequence number come from the watchdog's line."""
    message = parse_line(TIMEOUT)
    assert message is not None
    assert (message.kind, message.operation, message.sequence) == ("timeout", "ALLREDUCE", 171)


def test_messages_are_counted_and_told(node: Node) -> None:
    """Counters exist at 0 from the start; each message is told once with its rank."""
    before = values(node.collect())
    assert before["opsd_nccl_log_messages_total", "r1", "0", "warning"] == 0
    assert before["opsd_nccl_rank_logs", "r1"] == 2
    node.log(1, WARN + TIMEOUT)
    reading = node.collect()
    assert values(reading)["opsd_nccl_log_messages_total", "r1", "1", "warning"] == 1
    assert values(reading)["opsd_nccl_log_messages_total", "r1", "1", "timeout"] == 1
    assert [(event.kind, event.data["rank"], event.data["kind"]) for event in reading.events] == [
        ("nccl_log", 1, "warning"),
        ("nccl_log", 1, "timeout"),
    ]
    assert node.collect().events == ()


def test_what_was_there_before_the_agent_is_not_told(node: Node) -> None:
    """A restarted agent does not take yesterday's warnings for new ones, but follows the log from there."""
    node.log(0, WARN)
    node.collector = node.agent()
    assert node.collect().events == ()
    node.log(0, WARN)
    assert len(node.collect().events) == 1


def test_a_new_generation_is_followed_from_its_first_line(node: Node) -> None:
    """The last words of the old generation are not lost, and counts go on."""
    node.log(0, WARN)
    node.collect()
    node.log(0, WARN)
    node.start_generation(2)
    node.log(0, WARN)
    reading = node.collect()
    assert len(reading.events) == 2
    assert values(reading)["opsd_nccl_log_messages_total", "r1", "0", "warning"] == 3


def test_a_flood_is_counted_and_not_told_line_by_line(node: Node) -> None:
    """A thousand warnings are a number, and a few events."""
    node.log(0, WARN * 1000)
    reading = node.collect()
    assert values(reading)["opsd_nccl_log_messages_total", "r1", "0", "warning"] == 1000
    assert 0 < len(reading.events) < 50


def test_the_run_folder_of_somebody_else_is_not_read(node: Node, tmp_path: Path) -> None:
    """A run.json that points through a symbolic link, or nowhere, leads to no logs."""
    node.log(0, WARN)
    (tmp_path / "link").symlink_to(node.folder)
    for folder in (str(tmp_path / "link"), str(tmp_path / "nowhere"), "relative"):
        run = json.loads((node.memory / "run.json").read_text())
        (node.memory / "run.json").write_text(json.dumps({**run, "folder": folder}))
        reading = node.collect()
        assert values(reading)["opsd_nccl_rank_logs", "r1"] == 0
        assert reading.events == ()


def test_logs_are_followed_where_the_launcher_put_them(node: Node, tmp_path: Path) -> None:
    """``opsd launch --log-dir`` puts them outside the run folder."""
    elsewhere = tmp_path / "elsewhere"
    node.logs.parent.rename(elsewhere)
    run = json.loads((node.memory / "run.json").read_text())
    (node.memory / "run.json").write_text(json.dumps({**run, "logs": str(elsewhere)}))
    node.collect()
    node.logs = elsewhere / node.logs.name
    node.log(0, WARN)
    assert [event.kind for event in node.collect().events] == ["nccl_log"]


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the owner of a folder needs root")
def test_a_run_folder_of_another_user_is_not_read(node: Node) -> None:
    """A user cannot have the agent read another user's logs."""
    node.log(0, WARN)
    os.chown(node.folder, 12345, 12345)
    assert node.collect().events == ()


def fr(sequence: int) -> bytes:
    """A dump whose last collective is ``sequence``."""
    call = {"process_group": ["0", ""], "profiling_name": "nccl:all_reduce", "state": "started", "time_created_ns": 1}
    entries = [{**call, "collective_seq_id": number, "retired": number < 7} for number in range(sequence + 1)]
    return json.dumps({"entries": entries, "pg_config": {"0": {"name": "0", "ranks": "[0, 1, 2, 3]"}}}).encode()


def test_dumps_are_judged_once_they_have_settled(node: Node) -> None:
    """Rank 2 has not called what the others wait in; rank 3 has left no dump."""
    for rank, last in ((0, 7), (1, 7), (2, 6)):
        node.dump(rank, fr(last))
        assert node.collect().events == ()
    (event,) = node.collect().events
    assert event.kind == "nccl_flight_recorder"
    assert (event.data["culprits"], event.data["missing"], event.data["no_dump"]) == ([2], [2], [3])
    assert (event.data["group"], event.data["sequence"], event.data["run"]) == ("0", 7, "r1")
    assert node.collect().events == ()


def test_dumps_that_cannot_be_used_are_told_once(node: Node) -> None:
    """Half a pickle is named; the others are still judged."""
    node.dump(0, b"\x80\x04.")
    node.dump(1, fr(7))
    (event,) = node.collect().events
    assert (event.kind, event.data["rank"]) == ("nccl_dump_unusable", 0)
    assert "not a flight recorder dump" in event.message
    (event,) = node.collect().events
    assert event.kind == "nccl_flight_recorder"


def test_dumps_of_an_earlier_hang_are_left_out(node: Node) -> None:
    """What is much older than the newest dump, or than the agent, says nothing about this hang."""
    node.dump(2, fr(6))
    os.utime(node.folder / "flight_recorder/rank-0002.json", (1, 1))
    for rank in (0, 1, 3):
        node.dump(rank, fr(7))
    node.collect()
    (event,) = node.collect().events
    assert event.data["missing"] == []
    assert event.data["no_dump"] == [2]
    node.collector = node.agent()
    node.collect()
    assert node.collect().events == ()


def test_only_the_node_of_rank_0_asks_and_judges(tmp_path: Path) -> None:
    """RAS has to hear the whole job for an answer; the other nodes leave it in peace."""
    with FakeRas(ras_json([ras_rank(0, {})])) as server:
        node = Node(tmp_path, ranks=(8, 9))
        node.collector = NcclCollector(node.root, addresses=[server.address], wall=lambda: 1000.0)
        node.collect()
        node.dump(8, fr(7))
        for _ in range(3):
            reading = node.collect()
            assert "opsd_nccl_ras_up" not in {sample.metric.name for sample in reading.samples}
            assert reading.events == ()
        assert server.requests == []


def test_a_node_without_runs_has_no_data(tmp_path: Path) -> None:
    """An expected absence."""
    assert isinstance(NcclCollector(tmp_path / "none").collect(), NoData)


class Asking:
    """A RAS watch on a clock of its own, polled until it has its next answer."""

    def __init__(self, server: FakeRas) -> None:
        self.now = 0.0
        self.watch = RasWatch([server.address], 10.0, Sandbox())

    def next(self) -> Reading:
        """Ten seconds later: what is known once the answer has come, with all events on the way."""
        self.now += 10.0
        deadline = time.monotonic() + 30
        events: list[Event] = []
        while time.monotonic() < deadline:
            reading = self.watch.look(self.now, 1000.0, OWN)
            events += reading.events
            age = values(reading).get(("opsd_nccl_ras_answer_age_seconds",))
            if age == 0:
                return Reading(reading.samples, tuple(events))
            time.sleep(0.005)
        raise AssertionError("RAS was not answered")


def behind(count: int) -> str:
    """An answer in which rank 1 is at ``count`` and rank 0 one further."""
    return ras_json([ras_rank(0, {"AllReduce": count + 1}), ras_rank(1, {"AllReduce": count})])


def test_the_same_difference_twice_is_a_stall() -> None:
    """Counts differ for a moment all the time; only if nothing has moved since is somebody stuck."""
    with FakeRas(behind(5)) as server:
        asking = Asking(server)
        first = asking.next()
        assert values(first)["opsd_nccl_problems", "mismatch"] == 1
        assert values(first)["opsd_nccl_stalled_seconds",] == 0
        assert first.events == ()
        second = asking.next()
        assert values(second)["opsd_nccl_stalled_seconds",] == 10
        (event,) = second.events
        assert (event.kind, event.data["kind"], event.user) == ("nccl_ras", "mismatch", os.geteuid())
        assert event.data["ranks"] == [{"rank": 1, "host": "10.0.0.1", "pid": 1001, "gpu": 1}]
        third = asking.next()
        assert values(third)["opsd_nccl_stalled_seconds",] == 20
        assert third.events == ()
        server.answer = behind(6).encode()
        assert values(asking.next())["opsd_nccl_stalled_seconds",] == 0


def test_missing_ranks_are_told_at_once() -> None:
    """An error or a silent rank needs no second look, and is told once."""
    with FakeRas(ras_json([ras_rank(0, {})], [missing_rank(1)])) as server:
        asking = Asking(server)
        (event,) = asking.next().events
        assert event.data["kind"] == "incomplete"
        assert asking.next().events == ()


def test_an_unusable_answer_makes_it_unknown() -> None:
    """RAS that closes mid-answer is down, and what it said before is not repeated."""
    with FakeRas(behind(5)) as server:
        asking = Asking(server)
        asking.next()
        server.answer = server.answer[:200]
        asking.now += 10
        deadline = time.monotonic() + 30
        while (found := values(asking.watch.look(asking.now, 1000.0, OWN)))["opsd_nccl_ras_up",] == 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert found == {("opsd_nccl_ras_up",): 0, ("opsd_nccl_ras_answer_age_seconds",): 10}


def test_an_address_that_cannot_be_asked_is_passed_over(tmp_path: Path) -> None:
    """As ::1 on a node without IPv6: the other one is asked the next time, and nothing is raised."""
    with FakeRas(ras_json([ras_rank(0, {})])) as server:
        asking = Asking(server)
        asking.watch = RasWatch([("::1%none", 28028), server.address], 10.0, Sandbox())
        assert values(asking.watch.look(0.0, 1000.0, OWN)) == {("opsd_nccl_ras_up",): 0}
        assert values(asking.next())["opsd_nccl_ras_up",] == 1


@pytest.mark.parametrize(
    "name, changes",
    [
        (b"\xff", {}),
        (b"r2", {"folder": "/run\0s", "logs": "/run\0s/logs"}),
        (b"r2", {"world_size": 1 << 40}),
    ],
)
def test_a_hostile_folder_is_passed_over(node: Node, name: bytes, changes: dict[str, object]) -> None:
    """Everybody may make one: its name is no label, and what it says opens and fills nothing."""
    folder = Path(os.fsdecode(os.fsencode(node.root) + b"/" + name))
    folder.mkdir()
    run = json.loads((node.memory / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, **changes}))
    (folder / "rank-0000.page").touch()
    node.log(1, TIMEOUT)
    reading = node.collect()
    assert {event.data["run"] for event in reading.events} == {"r1"}
    assert {sample.labels[0] for sample in reading.samples if sample.metric.name == "opsd_nccl_rank_logs"} == {"r1"}


def test_every_series_is_declared(node: Node) -> None:
    """What is exported stands in the collector's list."""
    assert {sample.metric for sample in node.collect().samples} <= set(METRICS)
