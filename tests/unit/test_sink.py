"""The agent's log where nobody reads it: no line waits, and what is lost is counted and told."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import socket
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.agent.logs import JournalWriter, Log, Sink

LINES = 5_000


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def drain(reader: int) -> bytes:
    """Read what is there; only the reader's end is made non-blocking."""
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK)
    read = b""
    try:
        while part := os.read(reader, 1 << 16):
            read += part
    except BlockingIOError:
        pass
    return read


def test_a_pipe_that_nobody_reads_stops_nothing(pipe: tuple[int, int]) -> None:
    """It stopped the loop, and with it every tick. Read again, it has whole lines and the number of those lost."""
    reader, writer = pipe
    sink = Sink(writer)
    log = Log(lambda event: sink.line(json.dumps(event)), lambda: sink.lost)
    for number in range(LINES):
        log.info("x" * 100, number=number)
    assert sink.lost > LINES // 2
    before = drain(reader).decode().splitlines()
    log.info("again")
    told, again = (json.loads(line) for line in drain(reader).decode().splitlines() if line and line[-1] == "}")
    assert told["lines"] + len([line for line in before if line[-1] == "}"]) == LINES
    assert again["event"] == "again"


def test_a_line_that_was_cut_off_does_not_spoil_the_next(pipe: tuple[int, int]) -> None:
    """Long lines are written in parts, and the pipe may be full after some of them."""
    reader, writer = pipe
    sink = Sink(writer)
    while sink.line("y" * 10_000):
        pass
    drain(reader)
    sink.line("next")
    assert drain(reader).decode().splitlines() == ["", "next"]


def test_a_stopped_terminal_stops_nothing() -> None:
    """Ctrl-S, or a terminal whose other end does not read."""
    outer, inner = pty.openpty()
    try:
        termios.tcflow(inner, termios.TCOOFF)
        sink = Sink(inner)
        for _ in range(LINES):
            sink.line("z" * 100)
        assert sink.lost > 0
    finally:
        os.close(inner)
        os.close(outer)


def test_a_reader_that_has_gone_is_counted(pipe: tuple[int, int]) -> None:
    """Nothing is raised."""
    reader, writer = os.dup(pipe[0]), pipe[1]
    os.close(reader)
    gone_reader, gone_writer = os.pipe()
    os.close(gone_reader)
    sink = Sink(gone_writer)
    assert not sink.line("x") and sink.lost == 1
    os.close(gone_writer)
    assert Sink(writer).line("x")


def test_a_journal_that_hangs_stops_nothing(tmp_path: Path, pipe: tuple[int, int]) -> None:
    """Its socket is full, then the stream that leads to it: each entry is taken or counted."""
    reader, writer = pipe
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "socket"))
        sink = Sink(writer)
        log = Log(JournalWriter(sink, str(tmp_path / "socket")), lambda: sink.lost)
        for number in range(LINES):
            log.info("x" * 100, number=number)
        assert sink.lost > 0
        journal.setblocking(False)
        taken = sum(line[-1:] == b"}" for line in drain(reader).splitlines())
        with pytest.raises(BlockingIOError):
            while journal.recv(1 << 16):
                taken += 1
        assert taken + sink.lost == LINES
