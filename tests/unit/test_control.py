"""Asking a launcher whose answer is not what a launcher sends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opsd.control import ControlError, ask_launcher


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
