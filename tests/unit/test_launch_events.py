"""Event files: written to all targets, read line by line."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from opsd.files import FileTail
from opsd.launch.io import reporting
from opsd.launch.io.reporting import EventLog
from opsd.launch.ranks.ranks import read_error


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
