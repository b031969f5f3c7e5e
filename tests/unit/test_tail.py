"""Following event files: every line once whatever the cuts, and nothing that a hostile owner can do with the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.lib.rights import CHUNK, MAX_LINE, LineCutter, Rights, Tail, read_small

OWN = Rights(os.getuid(), frozenset())
lines_of_text = st.lists(st.binary(min_size=1, max_size=40).filter(lambda line: b"\n" not in line), max_size=20)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@given(lines_of_text, st.lists(st.integers(0, 900), max_size=30), st.binary(max_size=10))
def test_lines_come_whole_whatever_the_cuts(lines: list[bytes], cuts: list[int], partial: bytes) -> None:
    """A line is delivered once it is complete; what follows the last line end is not."""
    partial = partial.replace(b"\n", b"")
    data = b"".join(line + b"\n" for line in lines) + partial
    cutter, edges = LineCutter(), sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    pieces = [data[start:end] for start, end in pairwise(edges)]
    assert [line for piece in pieces for line in cutter.feed(piece)] == lines


@given(lines_of_text, st.integers(1, 30))
def test_lines_that_are_too_long_are_skipped_alone(lines: list[bytes], limit: int) -> None:
    """The line after an overlong one is delivered."""
    cutter = LineCutter(max_line=limit)
    data = b"".join(line + b"\n" for line in lines)
    got = [line for at in range(0, len(data), 7) for line in cutter.feed(data[at : at + 7])]
    assert got == [line for line in lines if len(line) <= limit]


def test_a_growing_file_is_read_on_from_where_it_was_left(tmp_path: Path, folder: int) -> None:
    """Each line once, the unfinished one when it is finished."""
    tail, path = Tail("events", OWN), tmp_path / "events"
    assert tail.read(folder) == []
    path.write_bytes(b"one\ntw")
    assert tail.read(folder) == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.read(folder) == [b"two", b"three"]
    assert tail.read(folder) == []


def test_a_file_made_anew_is_read_from_its_start(tmp_path: Path, folder: int) -> None:
    """The next launcher of a run removes its predecessor's files."""
    tail, path = Tail("events", OWN), tmp_path / "events"
    path.write_bytes(b"old\nold\n")
    tail.read(folder)
    (tmp_path / "draft").write_bytes(b"new\n")
    (tmp_path / "draft").rename(path)
    assert tail.read(folder) == [b"new"]


def test_a_truncated_file_is_read_from_its_start(tmp_path: Path, folder: int) -> None:
    """An offset beyond the end would wait for ever."""
    tail, path = Tail("events", OWN), tmp_path / "events"
    path.write_bytes(b"a long first line\n")
    tail.read(folder)
    os.truncate(path, 0)
    with path.open("ab") as file:
        file.write(b"b\n")
    assert tail.read(folder) == [b"b"]


def test_a_flood_is_taken_in_portions(tmp_path: Path, folder: int) -> None:
    """One call reads a bounded amount, the next ones the rest, and nothing is lost."""
    line = b"x" * 999
    (tmp_path / "events").write_bytes((line + b"\n") * 600)
    tail = Tail("events", OWN)
    first, portions = tail.read(folder), [tail.read(folder) for _ in range(3)]
    assert len(first) == CHUNK // 1000
    assert len(first) + sum(map(len, portions)) == 600


def test_an_endless_line_is_not_kept(tmp_path: Path, folder: int) -> None:
    """Memory stays bounded and the line after it arrives."""
    (tmp_path / "events").write_bytes(b"x" * (MAX_LINE + CHUNK) + b"\nshort\n")
    tail = Tail("events", OWN)
    assert [line for _ in range(4) for line in tail.read(folder)] == [b"short"]


def test_symbolic_links_and_pipes_are_left_alone(tmp_path: Path, folder: int) -> None:
    """A user must not make root read another file or block on a pipe."""
    (tmp_path / "secret").write_bytes(b"secret\n")
    (tmp_path / "events").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    assert Tail("events", OWN).read(folder) == []
    assert Tail("pipe", OWN).read(folder) == []
    assert read_small("events", folder, OWN) is None
    assert read_small("pipe", folder, OWN) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may read the other file")
def test_a_hard_link_to_anothers_file_is_left_alone(tmp_path: Path, folder: int) -> None:
    """As a user may make where fs.protected_hardlinks is 0; one that everybody may read is read."""
    (tmp_path / "shadow").write_bytes(b"secret\n")
    (tmp_path / "shadow").chmod(0o640)
    (tmp_path / "events").hardlink_to(tmp_path / "shadow")
    user = Rights(65534, frozenset())
    assert Tail("events", user).read(folder) == []
    assert read_small("events", folder, user) is None
    (tmp_path / "shadow").chmod(0o644)
    assert Tail("events", user).read(folder) == [b"secret"]
    assert read_small("events", folder, user) is not None


def test_a_small_file_must_be_small(tmp_path: Path, folder: int) -> None:
    """Beyond the limit it is not read at all; half a JSON file is of no use."""
    (tmp_path / "run.json").write_bytes(b"x" * 100)
    assert read_small("run.json", folder, OWN, limit=99) is None
    content, _ = read_small("run.json", folder, OWN, limit=100) or (b"", 0.0)
    assert content == b"x" * 100
