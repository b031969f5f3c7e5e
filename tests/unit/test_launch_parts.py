"""The small parts of the launcher: environment, folders, events, loop, control socket."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opsd.client import process_start
from opsd.launch.io import reporting
from opsd.launch.io.control import MAX_CONNECTIONS, ControlServer
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import EventLog, EventTail
from opsd.launch.ranks.process import launcher_mark
from opsd.launch.ranks.ranks import read_error
from opsd.launch.ranks.settings import (
    GENERATION_VARIABLES,
    RESTART_VARIABLES,
    Assignment,
    Program,
    Settings,
    free_port,
    gpu_count,
    gpu_of,
)
from opsd.rundir import RUN_NAME, RunError, RunFolders, RunState, prune, valid_name


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition that something else makes true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# -- environment -----------------------------------------------------------------------------------------------------


def settings_of(local_size: int) -> Settings:
    """Those of the run r in job 77, with so many ranks on this node, n1."""
    program = Program("script", "/train.py", (), "python", Path("/"))
    return Settings(program, "r", "77", "n1", local_size, "id")


def test_environment_is_torchruns(tmp_path: Path) -> None:
    """A rank finds every variable that torchrun sets, and opsd's own."""
    place, settings = Assignment(0, 1, 0, 4, 4, "127.0.0.1", 29_501), settings_of(4)
    env = settings.environment(2, tmp_path, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) | settings.generation_environment(
        place, 2, generation=3, restarts=1, error_file=tmp_path / "error.json", page=tmp_path / "page"
    )
    assert env == {
        "CUDA_VISIBLE_DEVICES": "4,5,6,7", "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "2", "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "8", "TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "OPSD_RANK_PAGE": str(tmp_path / "page"),
        "OPSD_GENERATION": "3", "OPSD_RUN": "r", "OPSD_RUN_DIR": str(tmp_path), "OPSD_JOB": "77", "OPSD_NODE": "n1",
        "OPSD_GPU": "6", "OPSD_LAUNCHER": launcher_mark(),
    }  # fmt: skip


def test_what_a_generation_tells_is_known(tmp_path: Path) -> None:
    """A standby on a spare node is told which variables it has yet to be told."""
    place = Assignment(0, 1, 0, 1, 1, "127.0.0.1", 29_501)
    env = settings_of(1).generation_environment(
        place, 0, generation=1, restarts=0, error_file=tmp_path / "error.json", page=tmp_path / "page"
    )
    assert env.keys() == GENERATION_VARIABLES > RESTART_VARIABLES


def test_user_settings_win(tmp_path: Path) -> None:
    """What the user has set for the ranks is left alone."""
    env = settings_of(2).environment(0, tmp_path, {"OMP_NUM_THREADS": "7"})
    assert env["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("visible", "local_rank", "gpu"),
    [("0,3", 1, 3), ("GPU-aa,GPU-bb", 0, None), ("", 0, None), ("2", 1, None), (None, 1, 1), (None, 2, None)],
)
def test_gpu_of_a_rank(tmp_path: Path, visible: str | None, local_rank: int, gpu: int | None) -> None:
    """The GPU comes from CUDA_VISIBLE_DEVICES, otherwise from the driver's list of two."""
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "driver/nvidia/gpus" / bus).mkdir(parents=True)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_of(env, local_rank, str(tmp_path)) == gpu


def test_no_driver_no_gpus(tmp_path: Path) -> None:
    """A node without the driver has no GPUs."""
    assert gpu_count({}, str(tmp_path)) == 0


def test_port_can_be_bound() -> None:
    """A fresh port is free to bind, and outside the range of ports for outgoing connections."""
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    assert port < 32_768


# -- folders ---------------------------------------------------------------------------------------------------------


def folders_of(run: str, tmp_path: Path) -> RunFolders:
    """The folders of a run whose shared memory is ``tmp_path / "shm"``."""
    return RunFolders.create(run, folder=tmp_path / run, logs=None, shared=tmp_path / "shm")


def state(pid: int, start: int) -> RunState:
    """A run.json with the given launcher."""
    return RunState(
        run="r", job="", node="n", state="running", generation=1, launcher_pid=pid, launcher_start=start, world_size=1,
        control="c", folder="f",
    )  # fmt: skip


def test_run_of_a_living_launcher_is_refused(tmp_path: Path) -> None:
    """Two launchers cannot have one run; the message names the other's pid and the way out."""
    folders = folders_of("r", tmp_path)
    parent = os.getppid()
    folders.write_state(state(parent, process_start(parent) or 0))
    with pytest.raises(RunError, match=f"process {parent}.*--run-id"):
        folders_of("r", tmp_path)


def test_run_of_a_dead_launcher_is_taken_over(tmp_path: Path) -> None:
    """What a killed launcher left is cleared away; generations go on counting; other people's files stay."""
    folders = folders_of("r", tmp_path)
    folders.write_state(state(os.getppid(), 1))
    folders.page(0).write_bytes(b"old")
    (folders.memory / "mine.bin").write_bytes(b"keep")
    folders.generation_logs(4).mkdir(parents=True)
    folders.release()
    again = folders_of("r", tmp_path)
    assert sorted(path.name for path in again.memory.iterdir()) == ["mine.bin"]
    assert again.last_generation() == 4


def test_run_of_a_launcher_that_nobody_has_waited_for_is_taken_over(tmp_path: Path) -> None:
    """It was killed in a container whose first process does not collect the dead: it is there, and runs no more."""
    folders = folders_of("r", tmp_path)
    with subprocess.Popen(["true"]) as launcher:
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
        folders.write_state(state(launcher.pid, process_start(launcher.pid) or 0))
        folders.release()
        assert folders_of("r", tmp_path).run == "r"


def test_link_in_shared_memory_is_not_followed(tmp_path: Path) -> None:
    """A link planted under the run's name leads nowhere: the run gets the user's number, or is refused."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "shm/r").symlink_to(tmp_path / "elsewhere")
    assert folders_of("r", tmp_path).memory.name == f"r.{os.getuid()}"
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "shm/q").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"shm/q.{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="another user"):
        folders_of("q", tmp_path)


def test_run_is_taken_before_its_launcher_has_said_so(tmp_path: Path) -> None:
    """Of two launchers started at the same moment one gets the run; one that nobody looks for by name is renamed."""
    first = folders_of("r", tmp_path)
    with pytest.raises(RunError, match="being run by another process"):
        folders_of("r", tmp_path)
    twin = RunFolders.create("r", folder=None, logs=tmp_path / "logs", shared=tmp_path / "shm", alone=True)
    assert (twin.run, twin.memory, twin.logs) == ("r-2", tmp_path / "shm/r-2", tmp_path / "logs/r-2")
    first.release()
    again = RunFolders.create("r", folder=tmp_path / "r", logs=None, shared=tmp_path / "shm", alone=True)
    assert again.run == "r"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("train.v2", "train.v2"),
        ("my training", "my-training-"),
        ("Büro größer", "Buro-groer-"),
        ("训练", "run-"),
        ("../../etc", "etc-"),
        ("x" * 80, "x" * 54 + "-"),
    ],
)
def test_any_text_makes_a_name(text: str, name: str) -> None:
    """What is no valid name of a run becomes one, always the same; two texts never become one name."""
    made = valid_name(text)
    assert made.startswith(name)
    assert RUN_NAME.fullmatch(made)
    assert made == valid_name(text)
    assert made == text or made != valid_name(text + " ")


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A run folder below a file is refused with its name."""
    (tmp_path / "r").write_text("")
    with pytest.raises(RunError, match=r"cannot be made"):
        folders_of("r", tmp_path)


def test_prune_removes_old_runs_only(tmp_path: Path) -> None:
    """Finished long ago: gone. Alive, recent, or with files of others in it: kept."""
    old, alive, recent, shared = (folders_of(name, tmp_path) for name in "abcd")
    alive.write_state(state(os.getppid(), process_start(os.getppid()) or 0))
    (old.memory / "events.jsonl").write_text("{}\n")
    (shared.memory / "checkpoint.bin").write_bytes(b"x")
    now = time.time()
    for folders, age in ((old, 9000), (alive, 9000), (recent, 10), (shared, 9000)):
        os.utime(folders.memory, (now - age, now - age))
    for folders in (old, recent, shared):
        folders.release()
    prune(tmp_path / "shm", now, keep_s=3600)
    assert sorted(path.name for path in (tmp_path / "shm").iterdir()) == ["b", "c", "d"]
    assert (shared.memory / "checkpoint.bin").exists()


# -- events ----------------------------------------------------------------------------------------------------------


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
    assert [record["event"] for record in EventTail(path).read()] == ["a", "c", "d"]
    assert len(path.read_bytes().splitlines()) == 4


def test_tail_takes_whole_lines_only(tmp_path: Path) -> None:
    """A line being written is left for later, garbage is skipped, a link is not followed."""
    path = tmp_path / "events"
    tail = EventTail(path)
    assert list(tail.read()) == []
    path.write_text('{"event": "a"}\nnot json\n' + "[" * 100_000 + '\n[1]\n{"event": "b"')
    assert [record["event"] for record in tail.read()] == ["a"]
    with path.open("a") as file:
        file.write("}\n")
    assert [record["event"] for record in tail.read()] == ["b"]
    (tmp_path / "link").symlink_to(path)
    assert list(EventTail(tmp_path / "link").read()) == []


def test_nested_error_file_is_none(tmp_path: Path) -> None:
    """What a rank leaves cannot end its launcher."""
    (tmp_path / "error.json").write_text("[" * 100_000)
    assert read_error(tmp_path / "error.json") is None


# -- loop and control socket -----------------------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A loop served by a thread."""
    loop = Loop()
    loop.every(0.01, lambda: None)
    thread = threading.Thread(target=loop.run)
    until_started = threading.Event()
    loop.later(0.0, until_started.set)
    thread.start()
    until_started.wait(10)
    yield loop
    loop.later(0.0, loop.stop)
    thread.join(10)


def test_timers_run_in_order_and_can_be_cancelled(loop: Loop) -> None:
    """The earlier timer runs first, a cancelled one never."""
    calls: list[str] = []
    loop.later(0.05, lambda: calls.append("late"))
    cancelled = loop.later(0.03, lambda: calls.append("never"))
    loop.later(0.02, lambda: calls.append("early"))
    cancelled.cancel()
    until(lambda: "late" in calls)
    assert calls == ["early", "late"]


def ask(path: Path, *lines: bytes) -> list[dict[str, object]]:
    """Send lines to a control socket whose path may be longer than a socket's may be."""
    folder = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")
        connection.sendall(b"".join(line + b"\n" for line in lines))
        with connection.makefile() as answers:
            found = [json.loads(answers.readline()) for _ in lines]
    os.close(folder)
    return found


def test_control_answers_line_by_line(tmp_path: Path, loop: Loop) -> None:
    """Each line gets its answer, nonsense a refusal, and the socket is for its user only."""
    deep = tmp_path / ("long-" * 30)
    deep.mkdir()
    path = deep / "control.sock"
    server = ControlServer(path, loop, lambda request: {"ok": True, "echo": request["cmd"]})
    assert ask(path, b'{"cmd": "a"}', b"nonsense", b"[" * 60_000, b"[]", b'{"cmd": "b"}') == [
        {"ok": True, "echo": "a"},
        {"ok": False, "error": "the request is not JSON"},
        {"ok": False, "error": "the request is not JSON"},
        {"ok": False, "error": "the request is not a JSON object"},
        {"ok": True, "echo": "b"},
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    loop.later(0.0, server.close)
    until(lambda: not path.exists())


def test_control_socket_survives_floods(tmp_path: Path, loop: Loop) -> None:
    """A client that never ends its line is dropped, and others are still served."""
    path = tmp_path / "control.sock"
    server = ControlServer(path, loop, lambda request: {"ok": True})
    with socket.socket(socket.AF_UNIX) as flood:
        flood.settimeout(10)
        flood.connect(str(path))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(100):
                flood.sendall(b"x" * 65_536)
    assert ask(path, b"{}") == [{"ok": True}]
    loop.later(0.0, server.close)
    until(lambda: not path.exists())


def test_control_answers_one_line_of_a_client_in_one_turn(tmp_path: Path) -> None:
    """Thousands of requests sent at once hold up nothing else that the loop has to do."""
    loop, calls = Loop(), []
    server = ControlServer(tmp_path / "control.sock", loop, lambda request: calls.append("answer") or {"ok": True})
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "control.sock"))
        client.sendall(b"{}\n" * 50)
        loop.every(0.0, lambda: calls.append("other"))
        loop.every(0.0, lambda: loop.stop() if calls.count("answer") == 50 else None)
        loop.run()
    server.close()
    assert not any(calls[at : at + 3].count("answer") > 2 for at in range(len(calls)))


def test_control_drops_a_client_that_does_not_read(tmp_path: Path, loop: Loop) -> None:
    """Who asks on and on and never reads the answers is dropped instead of being waited for."""
    path = tmp_path / "control.sock"
    server = ControlServer(path, loop, lambda request: {"ok": True, "much": "x" * 10_000})
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(path))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while True:
                client.sendall(b"{}\n" * 100)
    assert ask(path, b"{}")[0]["ok"] is True
    loop.later(0.0, server.close)
    until(lambda: not path.exists())


def test_control_makes_room_for_one_more_client(tmp_path: Path, loop: Loop) -> None:
    """Clients that connect and say nothing do not keep others out."""
    path = tmp_path / "control.sock"
    server = ControlServer(path, loop, lambda request: {"ok": True})
    with contextlib.ExitStack() as idle:
        for _ in range(MAX_CONNECTIONS + 5):
            idle.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        assert ask(path, b"{}") == [{"ok": True}]
    loop.later(0.0, server.close)
    until(lambda: not path.exists())


def test_control_socket_that_cannot_be_made_is_reported(
    tmp_path: Path, loop: Loop, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a control socket the run goes on, with a word."""
    ControlServer(tmp_path / "missing/control.sock", loop, lambda request: {}).close()
    reporting.flush(20)
    assert "no control socket" in capfd.readouterr().err
