"""The agent's log: on a terminal, in systemd's journal, and where nobody reads it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.logs import JournalWriter, Log, Sink, encode, leads_to_journal

# The agent's log on a terminal.


def test_what_users_write_has_no_effect_on_a_terminal() -> None:
    """A line of a rank's log is part of an incident, and may have escape sequences and line ends in it."""
    code = (
        "from opsd.agent.logs import configure; configure().info('x', text='a\\x1b[2J\\r\\nb\\x9b', exception='c\\nd')"
    )
    ours, terminal = os.openpty()
    try:
        subprocess.run([sys.executable, "-c", code], stderr=terminal, check=True, timeout=60)
        said = os.read(ours, 4096).decode()
    finally:
        os.close(terminal)
        os.close(ours)
    assert "=a [2J  b " in said
    assert said.count("\n") == 2  # the end, and that in the traceback


# The agent's log where nobody reads it: no line waits, and what is lost is counted and told.


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


# The agent's log in systemd's journal, by its native protocol, over a real socket.


def decode(entry: bytes) -> dict[str, str]:
    """The fields of an entry, as the journal reads them."""
    fields = {}
    while entry:
        name, _, rest = entry.partition(b"\n")
        (length,) = struct.unpack_from("<Q", rest)
        fields[name.decode()] = rest[8 : 8 + length].decode()
        assert rest[8 + length : 9 + length] == b"\n"
        entry = rest[9 + length :]
    return fields


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.settimeout(20)
        yield listener


def logged(folder: Path, code: str, *, connected: bool = True) -> list[str]:
    """The lines that a process with stderr in a file, which it believes to be the journal, writes there."""
    program = f"import sys\nfrom opsd.agent.logs import configure\nlog = configure(sys.argv[1])\n{code}"
    with (folder / "stderr").open("w+") as stderr:
        info = os.fstat(stderr.fileno())
        known = {"JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino if connected else 1}"}
        command = [sys.executable, "-c", program, str(folder / "socket")]
        subprocess.run(command, stderr=stderr, env={**os.environ, **known}, check=True, timeout=60)
        stderr.seek(0)
        return stderr.read().splitlines()


def test_each_value_has_a_field(journal: socket.socket, tmp_path: Path) -> None:
    """Names of opsd's own, a priority by which journalctl filters, and a message that says it all."""
    code = """
log.warning("collector", collector="nvml", state="hung", reason="")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("bug")
"""
    assert logged(tmp_path, code) == []
    first, second = (decode(journal.recv(1 << 16)) for _ in range(2))
    assert first == {
        "MESSAGE": "collector collector=nvml state=hung", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "opsd",
        "OPSD_COLLECTOR": "nvml", "OPSD_STATE": "hung", "OPSD_REASON": "",
    }  # fmt: skip
    assert (second["PRIORITY"], second["OPSD_EXCEPTION"].splitlines()[-1]) == (
        "3",
        "ZeroDivisionError: division by zero",
    )


def test_what_the_journal_does_not_take_is_on_stderr(tmp_path: Path) -> None:
    """Nobody listens, or the entry is too long for a datagram: no line is lost."""
    (line,) = logged(tmp_path, 'log.info("agent started", node="n")')
    assert line == '{"node": "n", "event": "agent started", "level": "info"}'


def test_without_the_journal_it_is_json(tmp_path: Path) -> None:
    """As in a container, or where stderr has been redirected."""
    (line,) = logged(tmp_path, 'log.info("agent started", node="n")', connected=False)
    assert line.startswith('{"node": "n", "event": "agent started", "level": "info", "timestamp": ')


@given(st.dictionaries(st.text(max_size=80), st.text() | st.integers() | st.none(), max_size=8))
def test_nothing_that_is_logged_forges_a_field(event: dict[str, object]) -> None:
    """Line ends, names of any kind: what a user's file said stays inside the value that it is."""
    names = decode(encode({**event, "event": "x", "level": "info"}))
    assert names["PRIORITY"] == "6"
    assert all(
        name.startswith("OPSD_") and len(name) <= 64
        for name in names.keys() - {"MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER"}
    )


def test_only_what_systemd_connected_leads_there(tmp_path: Path) -> None:
    """Processes that are started with another stderr inherit the variable."""
    with (tmp_path / "log").open("w") as file:
        info = os.fstat(file.fileno())
        assert leads_to_journal(file, {"JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino}"})
        assert not leads_to_journal(file, {"JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino + 1}"})
        assert not leads_to_journal(file, {})
