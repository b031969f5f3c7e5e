"""The agent's log in systemd's journal, by its native protocol, over a real socket."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.logs import encode, leads_to_journal


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
