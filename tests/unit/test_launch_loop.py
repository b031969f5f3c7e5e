"""The launcher's loop: timers, threads, children, and the control socket."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opsd.collectors.lib.processes import process_letter
from opsd.control import ControlError, ask_launcher
from opsd.launch.io import reporting
from opsd.launch.io.control import MAX_CONNECTIONS, ControlServer
from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import Exit, spawn
from tests.fakes.clock import until

# The event loop's timers and the control socket.


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


# Work beside the launcher's loop: it never fails for want of descriptors, and what hangs does not pile up.


@pytest.fixture
def real_loop() -> Loop:
    """A loop that gives up after a while."""
    loop = Loop()
    loop.later(20.0, loop.stop)
    return loop


@pytest.fixture
def no_descriptors(real_loop: Loop) -> Iterator[None]:
    """Not one descriptor can be had."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_it_returns_comes_from_the_loop(real_loop: Loop) -> None:
    """In the thread of the loop, and not in that of the work."""
    found: list[object] = []

    def done(result: int | OSError) -> None:
        found.extend((result, threading.current_thread()))
        real_loop.stop()

    assert real_loop.run_in_thread(lambda: 7, done)
    real_loop.run()
    assert found == [7, threading.current_thread()]


def test_an_oserror_is_given_and_anything_else_raised(real_loop: Loop) -> None:
    """The first is the world's, the second a mistake of ours."""
    found: list[object] = []
    real_loop.run_in_thread(
        lambda: Path("/nonexistent/folder").stat(), lambda result: (found.append(result), real_loop.stop())
    )
    real_loop.run()
    assert isinstance(found[0], FileNotFoundError)
    again = Loop()
    again.run_in_thread(lambda: 1 // 0, found.append)
    with pytest.raises(ZeroDivisionError):
        again.run()


@pytest.mark.usefixtures("no_descriptors")
def test_it_needs_no_descriptors(real_loop: Loop) -> None:
    """The launcher has none left, and still looks whether its generation holds."""
    found: list[object] = []
    real_loop.run_in_thread(lambda: 7, lambda result: (found.append(result), real_loop.stop()))
    real_loop.run()
    assert found == [7]


def test_work_of_one_key_is_done_once_at_a_time(real_loop: Loop) -> None:
    """A file server that hangs holds one thread and not one for every second."""
    hanging = threading.Event()
    found: list[str] = []

    def done(result: str | OSError) -> None:
        found.append(str(result))
        real_loop.stop()

    def work() -> str:
        hanging.wait()
        return "looked"

    assert real_loop.run_in_thread(work, done, key="look")
    threads = threading.active_count()
    assert [real_loop.run_in_thread(work, done, key="look") for _ in range(100)] == [False] * 100
    assert threading.active_count() == threads
    assert real_loop.run_in_thread(lambda: "other", lambda _: hanging.set(), key="other")
    real_loop.run()
    assert found == ["looked"]
    assert real_loop.run_in_thread(work, done, key="look"), "it is over, and may be done again"


def test_many_threads_at_once_are_all_heard(real_loop: Loop) -> None:
    """More than fit into what wakes the loop."""
    heard: list[int] = []
    threads = [
        threading.Thread(target=lambda: [real_loop.call_soon_threadsafe(lambda: heard.append(1)) for _ in range(5000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    real_loop.every(0.01, lambda: len(heard) == 20_000 and real_loop.stop())  # type: ignore[arg-type,func-returns-value]
    real_loop.run()
    assert len(heard) == 20_000


# The end of a process that the launcher has started.


PROGRAM = "import sys; sys.stdin.read(); sys.exit(3)"

TRACER = """
import ctypes, os, sys
libc, PTRACE_SEIZE = ctypes.CDLL(None, use_errno=True), 0x4206
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
refused = libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None)
print(os.strerror(ctypes.get_errno()) if refused else "", flush=True)
sys.stdin.read()
"""


def test_a_child_that_ends_under_a_debugger_is_noticed_once_that_lets_go() -> None:
    """As py-spy may be attached at the moment of a rank's end."""
    loop, seen = Loop(), list[Exit | None]()
    reader, writer = os.pipe()
    child = spawn([sys.executable, "-c", PROGRAM], env={}, cwd=Path("/"), output=2, stdin=reader)
    os.close(reader)
    command = [sys.executable, "-c", TRACER, str(child.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        refused = tracer.stdout.readline().strip()
        os.close(writer)
        until(lambda: process_letter(child.pid) == "Z")

        def ended() -> None:
            seen.append(child.exit())
            loop.stop()

        def let_go() -> None:
            seen.append(child.exit())
            tracer.stdin.close()  # type: ignore[union-attr]

        child.watch(loop, ended)
        loop.later(0.5, let_go)
        loop.later(60.0, loop.stop)
        loop.run()
    child.reap()
    if refused:
        pytest.skip(f"no process can be traced here: {refused}")
    assert seen == [None, Exit(3)]


# Asking a launcher whose answer is not what a launcher sends.


@contextmanager
def launcher(folder: Path, answer: Callable[[socket.socket], None]) -> Iterator[Path]:
    """The control socket of a launcher that gives its first caller ``answer``."""
    control = folder / "control.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(control))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield control
        thread.join(60)


def test_a_launcher_that_answers_byte_by_byte_holds_no_caller(tmp_path: Path) -> None:
    """The time is that of the whole answer: the drain of a node would wait for it otherwise."""

    def dribble(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for _ in range(1000):
                connection.sendall(b" ")
                time.sleep(0.05)

    with launcher(tmp_path, dribble) as control:
        began = time.monotonic()
        with pytest.raises(ControlError, match="does not answer: timed out"):
            ask_launcher(control, {"cmd": "status"}, timeout_s=0.3)
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "answer", [b"[" * 60_000 + b"\n", b"x" * 70_000, b"", b"{}"], ids=["deep", "long", "empty", "no end of line"]
)
def test_any_answer_is_an_answer_or_one_sentence(tmp_path: Path, answer: bytes) -> None:
    """Also one that is nested too deeply, too long, or has no end of line."""

    def send(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(answer)

    with launcher(tmp_path, send) as control:
        try:
            assert ask_launcher(control, {"cmd": "status"}) == {}
        except ControlError as error:
            assert "answered something else than" in str(error) or "does not answer" in str(error)
