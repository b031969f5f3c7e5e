"""The NCCL collector on run folders, with a RAS server of its own."""

from __future__ import annotations

import json
import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from opsd.collectors.base import Event, NoData, Reading
from opsd.collectors.lib.nccl.desync import Call, Dump, DumpError
from opsd.collectors.lib.nccl.ras import MAX_PROBLEMS, REQUEST, RasError, RasQuery, parse_status
from opsd.collectors.lib.nccl.run import KeptDumps, LogMessage, parse_line
from opsd.collectors.lib.sandbox import Sandbox
from opsd.collectors.lib.shares import Room
from opsd.collectors.nccl import MAX_OTHERS, METRICS, NcclCollector, RasWatch, UserThreads
from tests.fakes.clock import eventually
from tests.fakes.ras import GREETING, FakeRas, missing_rank, ras_json, ras_rank, ras_text

# The NCCL collector on run folders, with a RAS server of its own.


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


# What RAS says, in JSON and in text, and what it says when something goes wrong on the way.


AT_FIVE, AT_SIX = {"AllReduce": 5}, {"AllReduce": 6}


def ask(server: FakeRas, deadline_s: float = 30.0) -> bytes:
    """Poll as the collector does, only faster."""
    query = RasQuery(server.address, time.monotonic(), OWN, deadline_s)
    while (answer := query.poll(time.monotonic())) is None:
        time.sleep(0.01)
    return answer


def test_ranks_that_all_move_on_are_no_problem() -> None:
    """Equal counts, no errors, nobody missing."""
    status = parse_status(ras_json([ras_rank(0, AT_SIX), ras_rank(1, AT_SIX)]).encode())
    assert (status.nccl_version, status.communicators, status.problems) == ("2.28.9", 1, ())


def test_the_rank_that_has_launched_less_is_named() -> None:
    """With its host, process and GPU, since its number counts within the communicator only."""
    ranks = [ras_rank(number, AT_FIVE if number == 9 else AT_SIX) for number in range(16)]
    (problem,) = parse_status(ras_json(ranks).encode()).problems
    assert problem.kind == "mismatch"
    assert problem.text == "1 of 16 ranks are at AllReduce 5, others at up to 6"
    assert [(rank.rank, rank.host, rank.pid, rank.gpu) for rank in problem.ranks] == [(9, "10.0.0.2", 1009, 1)]


def test_asynchronous_errors_are_named() -> None:
    """A rank with an error, or in abort, is one; an operation in progress is none."""
    ranks = [ras_rank(0, {}, async_error=6), ras_rank(1, {}, abort_flag=True), ras_rank(2, {}, async_error=7)]
    (problem,) = parse_status(ras_json(ranks).encode()).problems
    assert (problem.kind, [rank.rank for rank in problem.ranks]) == ("error", [0, 1])


def test_missing_ranks_are_read_in_spite_of_the_missing_comma() -> None:
    """NCCL 2.28 prints invalid JSON exactly when ranks are missing."""
    answer = ras_json([ras_rank(0, AT_SIX)], [missing_rank(1), missing_rank(2)])
    assert '"nvml_dev": 0\n' in answer
    (problem,) = parse_status(answer.encode()).problems
    assert problem.kind == "incomplete"
    assert problem.text == "2 of 3 ranks do not answer"
    assert [rank.pid for rank in problem.ranks] == [1001, 1002]


def test_text_of_a_healthy_job() -> None:
    """NCCL before 2.28.7 refuses JSON and answers with text."""
    status = parse_status(ras_text().encode())
    assert (status.nccl_version, status.communicators, status.problems) == ("2.24.3", 5, ())


def test_text_names_the_few_that_lag() -> None:
    """A rank of its own line carries its count."""
    warning = """
#0-0 (a1b2c3d4e5f60718) MISMATCH
  Communicator ranks have different AllReduce operation counts
  31 ranks have launched up to operation 1000
  Rank 17 has launched up to operation 999 -- GPU 1 managed by process 4242 on node 10.0.0.3
"""
    (problem,) = parse_status(ras_text(warning=warning).encode()).problems
    assert (problem.kind, problem.communicator) == ("mismatch", "a1b2c3d4e5f60718")
    assert [(rank.rank, rank.host, rank.pid, rank.gpu) for rank in problem.ranks] == [(17, "10.0.0.3", 4242, 1)]
    assert "AllReduce" in problem.text


def test_text_does_not_blame_the_few_that_are_ahead() -> None:
    """RAS lists outliers; where these are ahead, the laggards are the many it does not list."""
    warning = """
#0-0 (a1b2) MISMATCH
  Communicator ranks have different AllReduce operation counts
  30 ranks have launched up to operation 999
  2 ranks have launched up to operation 1000
  Rank 0 -- GPU 0 managed by process 1 on node 10.0.0.1
  Rank 1 -- GPU 1 managed by process 2 on node 10.0.0.1
"""
    (problem,) = parse_status(ras_text(warning=warning).encode()).problems
    assert problem.ranks == ()


def test_text_of_errors_and_dead_processes() -> None:
    """Errors name ranks, dead processes name process and GPU; different CUDA and NVML numbers give the NVML one."""
    error = """
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 77 on node 10.0.0.4 managing GPU 5

#0-0 (a1b2) ERROR
  Asynchronous error on 1 rank
  Rank 3 reported Remote process error -- GPU 0 (NVML 3) managed by process 5 on node 10.0.0.1
"""
    dead, erred = parse_status(ras_text(error=error).encode()).problems
    assert (dead.kind, dead.ranks[0].pid, dead.ranks[0].gpu) == ("dead", 77, 5)
    assert (erred.kind, erred.ranks[0].rank, erred.ranks[0].gpu) == ("error", 3, 3)


JSON_ANSWER = ras_json([ras_rank(0, AT_SIX), ras_rank(1, AT_SIX)], [missing_rank(2)]).encode()

TEXT_ANSWER = ras_text().encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        GREETING.encode(),
        *(JSON_ANSWER[:cut] for cut in range(20, len(JSON_ANSWER) - 4, 97)),
        *(TEXT_ANSWER[:cut] for cut in range(0, len(TEXT_ANSWER) - 20, 61)),
        GREETING.encode() + b'{"communicators": 7, "nccl_version": "2"}',
        GREETING.encode() + b'{"communicators": [' + b"[" * 100_000,
        GREETING.encode() + b"\xff\x00\x1b[2J",
        JSON_ANSWER.replace(b'"rank": 2', b'"rank": Infinity'),
        JSON_ANSWER.replace(b"10.0.0.9", b"\\ud800"),
    ],
)
def test_half_answers_and_garbage_are_refused(answer: bytes) -> None:
    """A server that closes mid-answer, another service on the port, hostile nesting: one sentence, never a status."""
    with pytest.raises(RasError) as caught:
        parse_status(answer)
    assert "\n" not in str(caught.value)


def test_a_question_is_asked_in_one_go() -> None:
    """The request names protocol, timeout and format, and asks for the status; the whole answer comes back."""
    with FakeRas(JSON_ANSWER) as server:
        assert ask(server) == JSON_ANSWER
        assert server.requests == [REQUEST]


def test_a_server_that_never_finishes_is_given_up() -> None:
    """Polling never waits; after the deadline the question is over."""
    with FakeRas(GREETING, hold=True) as server, pytest.raises(RasError, match="has not answered in time"):
        ask(server, deadline_s=0.3)


def test_nobody_listens() -> None:
    """Without NCCL the connection is refused, which is an answer: nobody has to wait for the deadline."""
    with FakeRas("") as server:
        address = server.address
    now = time.monotonic()
    query = RasQuery(address, now, OWN)
    with pytest.raises(RasError, match="does not answer: Connection refused"):
        while query.poll(now) is None:
            time.sleep(0.01)


def test_another_users_ras_is_not_asked() -> None:
    """Nothing is sent before it is known whose process has accepted."""
    with FakeRas(JSON_ANSWER) as server:
        query = RasQuery(server.address, time.monotonic(), frozenset({os.geteuid() + 1}))
        with pytest.raises(RasError, match=f"belongs to user {os.geteuid()}, who leads no run here"):
            while query.poll(time.monotonic()) is None:
                time.sleep(0.01)
    assert server.requests in ([], [b""])


def test_problems_without_number_are_not_all_told() -> None:
    """Each is an event, and all of them are remembered until the next answer."""
    head = "#0-0 (abc) MISMATCH\n  1 communicators\n"
    answer = ras_text().encode() + f"\n{head}".encode() * 30_000
    assert len(parse_status(answer).problems) == MAX_PROBLEMS


# What is kept of flight recorder dumps has a most, of which each user has a part.


CALL = Call("0", "x", 7, "nccl:all_reduce", 7, 7, 1)

MIB = 1 << 20


def dump(calls: int = 0, ranks: int = 0, first: int = 0) -> Dump:
    """So many calls, and a group of so many ranks."""
    return Dump((CALL,) * calls, {"0": 7}, {"0": tuple(range(first, first + ranks))}, 0)


def test_groups_that_dumps_have_in_common_are_kept_once() -> None:
    """Each of 4,096 ranks lists all of them: 40 bytes each would be 640 MiB."""
    kept = KeptDumps(1, Room(16 * MIB))
    for rank in range(4_096):
        kept.keep(rank, 1.0, dump(ranks=4_096))
    assert len({id(one.members["0"]) for _, one in kept.of_rank.values()}) == 1
    assert kept.held < 8 * MIB


def test_groups_that_differ_count_each() -> None:
    """24 dumps of 1.3 MB, each with other ranks, left 240 MiB in the agent."""
    kept = KeptDumps(1, Room(48 * MIB))
    with pytest.raises(DumpError, match="no room left"):
        for rank in range(24):
            kept.keep(rank, 1.0, dump(ranks=1 << 18, first=rank))
    assert 0 < len(kept.of_rank) < 3


def test_what_is_forgotten_or_replaced_makes_room() -> None:
    """To the last byte, whatever dumps have in common."""
    kept = KeptDumps(1, Room(MIB))
    for turn in range(100):
        kept.keep(turn % 3, 1.0, dump(calls=50, ranks=1_000, first=turn % 2))
    for rank in range(4):
        kept.forget(rank)
    assert kept.held == 0 and kept.of_rank == {}


def test_users_leave_room_for_others() -> None:
    """Whatever they fill, the next one may have half of the rest, and all of them stay within the total."""
    room = Room(16 * MIB)
    users = [KeptDumps(user, room) for user in range(5)]
    for kept in users:
        with pytest.raises(DumpError):
            for rank in range(1_000):
                kept.keep(rank, 1.0, dump(calls=50))
    held = [kept.held for kept in users]
    assert sum(held) <= 16 * MIB
    assert all(one > 0.8 * 16 * MIB / 2**number for number, one in enumerate(held, 1))


def test_runs_of_a_user_share_and_those_that_are_gone_have_nothing() -> None:
    """A run folder that is removed takes its dumps along."""
    room = Room(MIB)
    first, second = KeptDumps(1, room), KeptDumps(1, room)
    first.keep(0, 1.0, dump(calls=400))
    with pytest.raises(DumpError):
        second.keep(0, 1.0, dump(calls=400))
    del first
    second.keep(0, 1.0, dump(calls=400))


# Work of several users, of which some does not end.


def test_what_ends_late_comes_later_and_holds_nobody_up() -> None:
    """The work of a user that has not ended is not begun again."""
    go, begun = threading.Event(), list[int]()

    def waits() -> str:
        begun.append(1)
        return "late" if go.wait(60) else "never"

    threads = UserThreads[str]("test")
    assert threads.run({1: waits, 2: lambda: "first"}, 0.1) == ["first"]
    assert threads.blocked == {1}
    assert threads.run({1: waits, 2: lambda: "second"}, 0.1) == ["second"]
    assert len(begun) == 1
    go.set()
    assert threads.run({}, 60) == ["late"]
    assert not threads.blocked


def test_an_error_of_one_users_work_is_no_others() -> None:
    """The results of the others are there, and the next work of the same user runs."""
    threads = UserThreads[int]("test")
    assert threads.run({1: partial(exit, 3), 2: lambda: 2}, 60) == [2]
    assert {user: type(error) for user, error in threads.failed.items()} == {1: SystemExit}
    assert threads.run({1: lambda: 4}, 60) == [4]
    assert not threads.failed


def test_user_ids_without_number_leave_threads_for_the_users_of_a_gpu() -> None:
    """The work of all of them hangs: each has a file system of its own that does not respond."""
    gate = threading.Event()
    threads = UserThreads[bool]("test")
    stuck = {user: partial(gate.wait, 60) for user in range(100_000, 100_100)}
    assert threads.run(stuck, 0.05, {1000}) == []
    assert len(threads.blocked) == MAX_OTHERS
    assert threads.run({**stuck, 1001: lambda: False}, 0.05, {1000}) == []
    assert eventually(lambda: threads.run({**stuck, 1000: lambda: True}, 0.05, {1000}) == [True])
    gate.set()


def test_processor_time_is_added_up() -> None:
    """It is that of the threads, not of who waits for them."""

    def busy() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    threads = UserThreads[None]("test")
    threads.run({1: busy, 2: busy}, 60)
    assert threads.taken_s >= 0.1
