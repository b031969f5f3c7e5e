"""The event loop's timers and the control socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.launch.io import reporting
from opsd.launch.io.control import MAX_CONNECTIONS, ControlServer
from opsd.launch.io.loop import Loop
from tests.fakes.clock import until


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
