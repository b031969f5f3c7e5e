"""What a launcher says: on stderr, in job.log, in events, and to people."""

from __future__ import annotations

import ast
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from opsd.files import FileTail
from opsd.launch.io import reporting
from opsd.launch.io.reporting import EventLog, WorkQueue, flush_all
from opsd.launch.io.run_log import JOB_LOG, EventText, JobLog, RunLog
from opsd.launch.ranks.ranks import read_error
from opsd.launch.run.announcer import (
    RESTART_S,
    STUCK_S,
    Announcer,
    Notices,
    Sender,
    agent_page,
    opening_block,
    resume_command,
)
from tests.fakes.clock import until
from tests.fakes.schemas import EVENTS
from tests.fakes.tree import ROOT
from tests.fakes.webhook import Webhook

# What the launcher says and writes never holds it up.


def test_work_is_done_in_order() -> None:
    """What is put first is done first, and ``flush`` waits for all of it."""
    done: list[int] = []
    work = WorkQueue("test")
    for number in range(100):
        work.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert work.flush(10)
    assert done == list(range(100))


def test_work_that_hangs_holds_up_nobody() -> None:
    """While one piece of work hangs, more is taken up to the limit; the rest is counted and told once it goes on."""
    hung, done, missed = threading.Event(), [], []
    work = WorkQueue("test", limit=5, missed=missed.append)
    began = threading.Event()
    work.put(lambda: (began.set(), hung.wait(30))[0])
    began.wait(10)
    for number in range(12):
        work.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert not work.flush(0.05)
    assert "test" in flush_all(0.05)
    hung.set()
    assert work.flush(10)
    assert done == [0, 1, 2, 3, 4]
    assert missed == [7]


def test_event_file_that_hangs_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """A fifo that nobody reads stands for a file server that hangs."""
    os.mkfifo(tmp_path / "hangs")
    reader = os.open(tmp_path / "hangs", os.O_RDONLY | os.O_NONBLOCK)
    log = EventLog("r", "n", [tmp_path / "hangs", tmp_path / "good"])
    for number in range(200):
        log.emit("resumed", step=number, text="x" * 1000)
    until(lambda: (tmp_path / "good").read_bytes().count(b"\n") == 200)
    os.close(reader)


def test_run_log_is_read_and_written_in_a_thread(tmp_path: Path) -> None:
    """A leader notes what leaders before it have written before it adds to it, in order, in a thread."""
    path = tmp_path / "events.jsonl"
    RunLog("r", "n1", path).relay({"event": "checkpoint_committed", "generation": 1, "step": 5}, 0.0)
    work = WorkQueue("run log")
    log = RunLog("r", "n2", path, work)
    log.relay({"event": "checkpoint_committed", "generation": 1, "step": 5}, 0.0)
    log.relay({"event": "checkpoint_committed", "generation": 1, "step": 6}, 0.0)
    log.emit("node_lost", lost="n1")
    assert work.flush(10)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["event"], record.get("step")) for record in records] == [
        ("checkpoint_committed", 5), ("checkpoint_committed", 6), ("node_lost", None),
    ]  # fmt: skip


def test_full_stderr_holds_up_nothing() -> None:
    """A program that says more than the pipe takes, to a reader that stands still, goes on and ends."""
    code = (
        "import sys\n"
        "from opsd.launch.io.reporting import print_message\n"
        "for number in range(5000):\n    print_message(f'{number} ' + 'x' * 100)\n"
        "print('done', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert process.wait(20) == 0


def test_what_was_not_shown_is_counted() -> None:
    """Once the reader goes on, it is told how many messages it has missed; those before are whole and in order."""
    code = (
        "import sys, time\n"
        "from opsd.launch.io import reporting\n"
        "for number in range(6000):\n    reporting.print_message(f'{number} ' + 'x' * 100)\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
        "reporting.flush(20)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        _, err = process.communicate(timeout=60)
    lines = err.decode().splitlines()
    told = [int(line.split()[1]) for line in lines if "are not shown" in line]
    shown = [int(line.split()[1]) for line in lines if "are not shown" not in line]
    assert sum(told) > 0
    assert len(shown) + sum(told) == 6000
    assert shown == sorted(set(shown))


# What the leader says on stderr: the opening, each restart in two lines, the command that goes on with a run.


class Log:
    """Keeps the events."""

    def __init__(self) -> None:
        self.generation = 1
        self.events: list[str] = []

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        self.events.append(event)

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        self.events.append(record["event"])


def announcer(said: list[str], *, opening: bool = True) -> tuple[Announcer, Log]:
    log = Log()
    notices = Notices("tiny", "", lambda text, fields: said.append(f"notice: {text}"), lambda: 0.0)
    opener = (lambda event: "opening") if opening else None
    return Announcer(log, opener, notices, lambda text, tone: said.append(text)), log


def test_opening_is_said_once_and_not_by_a_later_leader() -> None:
    """The first generation opens the run; others do not, and a launcher that takes over says nothing of it."""
    said: list[str] = []
    first, _ = announcer(said)
    for _ in range(2):
        first.emit("generation_started", nodes=["a", "b"], world_size=4)
    later, log = announcer(said, opening=False)
    later.emit("generation_started", nodes=["a", "b"], world_size=4)
    assert said == ["opening", "notice: tiny started: 4 ranks on a, b"] and log.events == ["generation_started"]


def test_a_restart_says_from_where_and_with_which_nodes_once() -> None:
    """Every node relays ``resumed``; the terminal has it once, with the checkpoint and the node that came."""
    said: list[str] = []
    told, log = announcer(said, opening=False)
    told.emit("generation_started", nodes=["a", "b"])
    told.generation = 2
    told.emit("generation_started", nodes=["a", "c"])
    told.relay({"event": "checkpoint_loaded", "generation": 2, "rank": 0, "step": 20, "tier": "memory"}, 0.0)
    resumed = {"event": "resumed", "generation": 2, "step": 21, "lost_steps": 3, "recovered_s": 2.04}
    told.relay(resumed, 0.0)
    told.relay(resumed, 0.0)
    told.relay({**resumed, "generation": 1}, 0.0)
    assert said == [
        "restarted: it goes on with step 21 from the checkpoint of step 20 after 2.0 s; 3 steps are done again; "
        "c took the place of b"
    ]
    assert log.events.count("resumed") == 3 and log.generation == 2


def test_opening_block_has_the_shape_and_the_places() -> None:
    """Run, ranks, nodes, spares, folder, logs, page and how to go on; what there is not has no line."""
    event = {"nodes": ["n1", "n2"], "spares": ["n3"], "world_size": 16}
    text = opening_block(
        "tiny", event, folder=Path("/r"), logs=Path("/r/logs"), page="http://n1:9477/job/tiny", resume=""
    )
    assert text.splitlines() == [
        "tiny: 16 ranks on n1, n2",
        "  spares    n3",
        "  folder    /r",
        "  logs      /r/logs",
        "  page      http://n1:9477/job/tiny",
    ]


def test_page_is_named_where_something_listens(tmp_path: Path) -> None:
    """The address is the configured one; a file that is no TOML, or nobody who listens, is no error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        file = tmp_path / "opsd.toml"
        file.write_text(f'[agent]\nlisten = "0.0.0.0:{port}"\n')
        assert agent_page("r", "n1", {"OPSD_CONFIG": str(file)}) == f"http://n1:{port}/job/r"
        file.write_text(f'[agent]\nlisten = "127.0.0.1:{port}"\nweb_config = "/w"\n')
        assert agent_page("r", "n1", {"OPSD_CONFIG": str(file)}) == f"https://127.0.0.1:{port}/job/r"
    assert agent_page("r", "n1", {"OPSD_CONFIG": str(file)}) == ""
    file.write_text('agent = "no section"\n')
    assert agent_page("r", "n1", {"OPSD_CONFIG": str(file)}).partition(":")[0] in ("", "http")


def test_resume_command() -> None:
    """Each start on one node has a new name, so the command names the run; Slurm keeps the job's."""
    typed = ["launch", "--nproc-per-node", "2", "train it.py"]
    assert resume_command(typed, "r-1", named=False, several=False, environ={}) == (
        "opsd launch --run-id r-1 --nproc-per-node 2 'train it.py'"
    )
    secret = ["launch", "--notify", "https://h/s3cret", "--notify=mailto://u:p@h", "x.py"]
    urls = ["https://h/s3cret", "mailto://u:p@h"]
    told = resume_command(secret, "r", named=True, several=False, secrets=urls, environ={})
    assert told == "opsd launch --notify URL --notify=URL x.py"
    assert resume_command(["train", "tiny"], "r-1", named=True, several=False, environ={}) == "opsd train tiny"
    assert resume_command(typed, "r-1", named=False, several=True, environ={}) == "the same command on each node"
    job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    assert resume_command(typed, "r-1", named=False, several=False, environ=job) == "scontrol requeue 5_2"


# Who is not at the terminal hears of start, restarts, standstill and end of a run, and of no failure to tell.


class Stage:
    """A run whose time and steps pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step: int | None = None
        self.sent: list[tuple[str, Mapping[str, object]]] = []
        self.notices = Notices("tiny", "7", lambda text, fields: self.sent.append((text, fields)), lambda: self.now)
        self.notices.lead(lambda: self.step)

    def after(self, seconds: float, step: int | None = None) -> list[str]:
        """What was told since the last call."""
        self.now += seconds
        self.step = self.step if step is None else step
        self.notices.look()
        told, self.sent = [text for text, _ in self.sent], []
        return told


def test_a_restart_is_told_once_it_has_succeeded() -> None:
    """With its cause and its cost in one message."""
    stage = Stage()
    stage.notices.began({"world_size": 8, "nodes": ["a", "b"]})
    assert stage.after(1, step=5) == ["tiny started: 8 ranks on a, b"]
    stage.notices.interrupted("rank 3 on b failed after step 5 with exit code 1")
    assert stage.after(2) == []
    stage.notices.ranks_started()
    stage.notices.resumed("it goes on with step 4 after 2.0 s; 2 steps are done again", 2)
    (sent,) = stage.sent
    assert sent[0].endswith("exit code 1; it goes on with step 4 after 2.0 s; 2 steps are done again")
    assert sent[1]["event"] == "restarted" and sent[1]["reason"] == "rank 3 on b failed after step 5 with exit code 1"
    assert (sent[1]["run"], sent[1]["job"], sent[1]["step"]) == ("tiny", "7", 5)


def test_a_restart_that_lasts_is_told_before_its_end() -> None:
    """Once; the message about its success follows, and a program without steps succeeds when its ranks run."""
    stage = Stage()
    stage.notices.interrupted("node b is lost")
    stage.notices.interrupted("the ranks cannot be started")
    assert stage.after(RESTART_S) == ["tiny is being restarted: the ranks cannot be started"]
    assert stage.after(RESTART_S) == []
    stage.notices.ranks_started()
    assert stage.after(0) == ["tiny restarted: the ranks cannot be started; the ranks run again"]
    assert stage.after(STUCK_S * 3) == []


def test_no_step_for_long_is_a_standstill() -> None:
    """Told once, with the last step; so is the next step. Before the first step the launcher has its own limit."""
    stage = Stage()
    assert stage.after(STUCK_S * 2) == []
    assert stage.after(1, step=12) == [] and stage.after(STUCK_S - 1) == []
    assert stage.after(1) == ["tiny is stuck: no step for 30 min; the last one is step 12"]
    assert stage.after(STUCK_S) == []
    assert stage.after(1, step=13) == ["tiny makes progress again, with step 13"]


def test_steps_that_are_long_or_done_again_are_no_standstill() -> None:
    """Ten usual steps may pass, and the time in which known steps are repeated, as they reach no further."""
    stage = Stage()
    stage.after(0, step=1)
    assert stage.after(600, step=2) == [] and stage.after(6000 - 1) == []
    assert stage.after(1)[0].startswith("tiny is stuck: no step for 1 h 40 min")
    again = Stage()
    again.after(0, step=0)
    again.after(1000, step=1000)
    again.notices.interrupted("node b is lost")
    again.notices.resumed("it goes on with step 1", 1000)
    again.after(0)
    assert again.after(STUCK_S + 999) == []
    assert again.after(1)[0].startswith("tiny is stuck")


def test_the_end_has_reason_and_report() -> None:
    """For programs as fields, for people in the text."""
    stage = Stage()
    stage.notices.finished(1, "rank 0 failed", "failed (rank 0 failed): 12 steps", Path("/r/report.html"))
    ((text, fields),) = stage.sent
    assert text == "tiny failed (rank 0 failed): 12 steps; report: /r/report.html"
    assert fields["event"] == "finished" and fields["exit_code"] == 1 and fields["report"] == "/r/report.html"


def test_a_dead_receiver_is_one_line_and_the_others_are_told(webhook: Webhook, tmp_path: Path) -> None:
    """No secret is in it. A file is read for each message, so that one may be mended while the run goes on."""
    said: list[str] = []
    file = tmp_path / "urls"
    sender = Sender(["http://127.0.0.1:9/s3cret", str(file), webhook.url], said.append)
    for text in ("one", "two"):
        sender(text, {})
    sender.flush(20.0)
    assert [post["text"] for post in webhook.posts] == ["one", "two"]
    assert len(said) == 2 and "s3cret" not in "".join(said)
    assert any(
        one.startswith("not notified: 127.0.0.1: the webhook could not be reached: Connection refused;") for one in said
    )
    file.write_text(webhook.url)
    sender("three", {})
    sender.flush(20.0)
    assert len(webhook.posts) == 4 and len(said) == 2


def test_a_silent_receiver_delays_no_other(webhook: Webhook) -> None:
    """It has 10 s for each message; the end of a run waits for 5 s."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = Sender([f"http://127.0.0.1:{silent.getsockname()[1]}/", webhook.url], lambda _: None)
        for text in ("one", "two"):
            sender(text, {})
        until(lambda: [post["text"] for post in webhook.posts] == ["one", "two"], within_s=8.0)


# Event files: written to all targets, read line by line.


def test_events_reach_every_file(tmp_path: Path) -> None:
    """Each line is complete in each file and carries run, node, generation and time."""
    targets = [tmp_path / "a", tmp_path / "b"]
    log = EventLog("r", "n", targets)
    log.generation = 2
    log.emit("resumed", step=7)
    log.flush()
    lines = [json.loads(path.read_text()) for path in targets]
    assert lines[0] == lines[1]
    assert lines[0] | {"t": 0} == {"t": 0, "event": "resumed", "generation": 2, "run": "r", "node": "n", "step": 7}


def test_full_disk_does_not_stop_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file that cannot take the events is reported once; the others get them."""
    log = EventLog("r", "n", [Path("/dev/full"), tmp_path / "b"])
    for step in range(3):
        log.emit("checkpoint_committed", step=step)
    log.flush()
    reporting.flush(20)
    assert len((tmp_path / "b").read_text().splitlines()) == 3
    assert capfd.readouterr().err.count("/dev/full") == 1


def test_line_cut_off_by_a_full_disk_costs_no_other(tmp_path: Path) -> None:
    """What fits of a line is written without an error; the next one stands on a line of its own."""
    path = tmp_path / "events"
    log = EventLog("r", "n", [path])
    log.emit("a")
    log.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        log.emit("b")
        log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for name in "cd":
        log.emit(name)
    log.flush()
    assert [record["event"] for record in FileTail(path).records()] == ["a", "c", "d"]
    assert len(path.read_bytes().splitlines()) == 4


def test_events_go_to_the_file_that_has_the_name(tmp_path: Path) -> None:
    """Also after another program has replaced it, as sed and editors do, or removed it."""
    path = tmp_path / "events"
    log = EventLog("r", "n", [path])
    log.emit("a")
    log.flush()
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    log.emit("b")
    log.flush()
    assert [record["event"] for record in FileTail(path).records()] == ["a", "b"]
    path.unlink()
    log.emit("c")
    log.flush()
    assert [record["event"] for record in FileTail(path).records()] == ["c"]


def test_tail_takes_whole_lines_only(tmp_path: Path) -> None:
    """A line being written is left for later, garbage is skipped, a link is not followed."""
    path = tmp_path / "events"
    tail = FileTail(path)
    assert list(tail.records()) == []
    path.write_text('{"event": "a"}\nnot json\n' + "[" * 100_000 + '\n[1]\n{"event": "b"')
    assert [record["event"] for record in tail.records()] == ["a"]
    with path.open("a") as file:
        file.write("}\n")
    assert [record["event"] for record in tail.records()] == ["b"]
    (tmp_path / "link").symlink_to(path)
    assert list(FileTail(tmp_path / "link").records()) == []


def test_nested_error_file_is_none(tmp_path: Path) -> None:
    """What a rank leaves cannot end its launcher."""
    (tmp_path / "error.json").write_text("[" * 100_000)
    assert read_error(tmp_path / "error.json") is None


# Whoever writes an event builds its fields by the class of its name, so that schema and documentation are true.


BY_VERB = {"checkpoint_uploaded", "checkpoint_fetched", "checkpoint_upload_failed", "checkpoint_fetch_failed"}

BY_FUNCTION = {"hang_detected", "straggler_found", "straggler_gone", "spare_joined", "segment_split", "evaluation"}
"""Their fields are the typed result of a function, or a line that an evaluation has written."""


def written() -> Iterator[tuple[str, str, str]]:
    """Place, name and class of each call that writes an event by name; the class is "" where it is not named there."""
    folders = [ROOT / "opsd/launch", ROOT / "opsd/adapters", ROOT / "opsd/checkpoints", ROOT / "trainer"]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for name, kind in _written(function):
                yield f"{path.name}:{function.name}", name, kind


def _written(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    built = {
        node.targets[0].id: _called(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)
    }
    for call in calls:
        names = [arg.value for arg in call.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if names and _called(call) in ("emit", "event", "append_event"):
            fields = next((word.value for word in call.keywords if word.arg is None), None)
            kind = _called(fields) if isinstance(fields, ast.Call) else built.get(getattr(fields, "id", ""), "")
            yield names[0], kind


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_fields_are_built_by_the_class_of_the_event() -> None:
    """And each event of opsd is written somewhere."""
    found = [*written()]
    assert len(found) > 30
    for place, name, kind in found:
        assert kind == EVENTS[name].__name__ or (name in BY_FUNCTION and not kind), f"{place}: {name} by {kind or '?'}"
    assert {name for _, name, _ in found} | BY_VERB | BY_FUNCTION == EVENTS.keys()


# job.log: what a person reads of a run.


STARTED = {"event": "generation_started", "generation": 1, "world_size": 2, "nodes": ["n1", "n2"], "spares": ["n3"]}

LOST = {"event": "node_lost", "lost": "n2", "silent_s": 2.13, "ranks": True}

AGAIN = {**STARTED, "generation": 2, "nodes": ["n1", "n3"], "spares": []}

RESUMED = {"event": "resumed", "generation": 2, "step": 121, "previous_step": 123, "lost_steps": 3, "recovered_s": 3.62}


def told(*events: dict[str, Any]) -> list[str]:
    """The lines without their time."""
    job_log = EventText()
    return [line.split(" ", 2)[2] for event in events if (line := job_log.line({"t": 0.0, "node": "n1", **event}))]


def test_a_loss_reads_as_one_text() -> None:
    """What died, who took its place, from which step, and how many steps are done again."""
    assert told(STARTED, LOST, AGAIN, RESUMED) == [
        "generation 1 runs on n1, n2; n3 stands by",
        "n2 is lost with its ranks: silent for 2.1 s",
        "generation 2 runs on n1, n3: n3 in the place of n2",
        "it goes on with step 121 after 3.6 s; 3 steps are done again",
    ]


def test_a_rank_that_fails_is_told_with_its_error_and_its_victims_are_not() -> None:
    """Only the culprit matters."""
    error = {"type": "ValueError", "message": "no\nsuch thing", "where": "train.py:3"}
    failed = {"event": "rank_exited", "rank": 5, "exit": "exit code 1", "step": 40, "culprit": True, "error": error}
    assert told(failed, {**failed, "rank": 6, "culprit": False}) == [
        "rank 5 on n1 failed after step 40: ValueError: no such thing"
    ]


def test_what_is_of_no_interest_to_a_person_is_no_line() -> None:
    """Checkpoints of every few minutes, for instance."""
    assert told({"event": "checkpoint_committed", "step": 20}, {"event": "data_mixture"}, {}) == []


@pytest.mark.parametrize("event", [{"event": "node_lost"}, {"event": "resumed", "recovered_s": "?"}, LOST | {"t": "x"}])
def test_an_event_of_another_release_is_still_a_line(event: dict[str, Any]) -> None:
    """Fields may be missing or unlike."""
    assert len(EventText().line(event).splitlines()) == 1


def test_the_leader_writes_the_log_beside_the_events(tmp_path: Path) -> None:
    """One that takes over goes on with it and tells nothing twice."""
    first = RunLog("r", "n1", tmp_path / "events.jsonl")
    first.emit("generation_started", nodes=["n1", "n2"], spares=[])
    second = RunLog("r", "n2", tmp_path / "events.jsonl")
    second.emit("generation_started", nodes=["n2"], spares=[])
    lines = (tmp_path / JOB_LOG).read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "generation 0 runs on n1, n2", "generation 0 runs on n2, without n1",
    ]  # fmt: skip


def test_the_jobs_own_output_gets_the_log_once_its_batch_script_is_dead(tmp_path: Path) -> None:
    """Before that the batch script copies it there."""
    output = tmp_path / "train-7.log"
    output.touch()
    environ = {"OPSD_BATCH_HOST": "n2", "OPSD_JOB_OUTPUT": f"{output.stat().st_ino}:{output}"}
    log = JobLog(tmp_path, environ)
    for event in (STARTED, LOST, AGAIN):
        log.tell({"t": 0.0, **event})
    assert [line.split()[0] for line in output.read_text().splitlines()] == ["opsd:", "opsd:"]
    assert len((tmp_path / JOB_LOG).read_text().splitlines()) == 3


@pytest.mark.parametrize("told", ["", "1:", ":/x", "12:{path}", "x:{path}"])
def test_an_output_that_is_not_shared_is_left_alone(tmp_path: Path, told: str) -> None:
    """Another file of that name on this node is not the job's."""
    output = tmp_path / "train-7.log"
    output.touch()
    log = JobLog(tmp_path, {"OPSD_BATCH_HOST": "n2", "OPSD_JOB_OUTPUT": told.format(path=output)})
    log.tell({"t": 0.0, **LOST})
    assert output.read_text() == ""
    assert (tmp_path / JOB_LOG).exists()


def test_a_batch_host_that_an_earlier_start_has_lost_is_not_lost(tmp_path: Path) -> None:
    """It runs the batch script of this start, which copies the log itself."""
    output = tmp_path / "train-7.log"
    output.touch()
    log = JobLog(tmp_path, {"OPSD_BATCH_HOST": "n2", "OPSD_JOB_OUTPUT": f"{output.stat().st_ino}:{output}"})
    log.remember(LOST)
    for event in (STARTED, RESUMED):
        log.tell({"t": 0.0, **event})
    assert output.read_text() == ""
