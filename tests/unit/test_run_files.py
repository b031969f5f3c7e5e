"""Files and folders that users write: what is opened, how much is read, and what is left alone."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import Reading
from opsd.collectors.lib.run_files import (
    CHUNK,
    MAX_LINE,
    LineCutter,
    Rights,
    Tail,
    groups_of_process,
    open_as,
    read_small,
)
from opsd.collectors.lib.run_slots import MAX_PER_OWNER, MAX_RUNS, SCAN_S, RunSlots
from opsd.collectors.lib.run_watch import ENTRIES, EVENT_BYTES
from opsd.collectors.lib.shares import Allowance, fill, fill_by_owner
from opsd.collectors.nccl import NcclCollector
from opsd.collectors.ranks import KEPT_BYTES, LEFT_OUT, RanksCollector
from tests.fakes.clock import FakeClock
from tests.fakes.run_folder import Clock, read, runs, write_run

# Which run folders are looked at, whatever users put below the root.


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to other users")


def lives(folder: Path, _owner: int) -> bool:
    """Folders called live-… live."""
    return folder.name.startswith("live")


def make(root: Path, *names: str, owner: int | None = None) -> None:
    for name in names:
        (root / name).mkdir()
        if owner is not None:
            os.chown(root / name, owner, owner)


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[RunSlots]:
    yield RunSlots(tmp_path, lives, clock=FakeClock().monotonic)


def names(slots: RunSlots, looks: int = 1) -> list[str]:
    for _ in range(looks):
        chosen = slots.look()
    return [folder.name for folder, _ in chosen]


def test_all_are_looked_at_where_there_is_room(tmp_path: Path, slots: RunSlots) -> None:
    """Those that have ended as well; what is no folder of a run, and what is gone, is not."""
    make(tmp_path, "a", "b", ".hidden")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert names(slots) == ["a", "b"]
    (tmp_path / "a").rmdir()
    assert names(slots) == ["b"]
    assert slots.left_out == 0


def test_what_lives_comes_first(tmp_path: Path, slots: RunSlots) -> None:
    """Once it was found out what does, and then for good, however many others are newer."""
    make(tmp_path, "live")
    os.utime(tmp_path / "live", (1, 1))
    make(tmp_path, *(f"job-{number:03d}" for number in range(MAX_RUNS + 20)))
    seen = [names(slots) for _ in range(100)]
    assert all(len(chosen) == MAX_RUNS for chosen in seen)
    first = next(number for number, chosen in enumerate(seen) if "live" in chosen)
    assert all("live" in chosen for chosen in seen[first:])
    assert slots.left_out == 0


def test_a_limit_that_bites_is_told(tmp_path: Path, slots: RunSlots) -> None:
    """Of more living runs than there are slots, those with a slot keep it."""
    make(tmp_path, *(f"live-{number:03d}" for number in range(MAX_RUNS)))
    first = names(slots, 5)
    make(tmp_path, *(f"job-{number:03d}" for number in range(3 * MAX_PER_OWNER)))
    assert names(slots, 20) == first


@needs_root
def test_what_has_ended_of_one_user_gives_way_to_what_lives_of_another(tmp_path: Path) -> None:
    """Each owner is within its own limit; all of them together are more than there are slots."""
    for owner in (1001, 1002):
        make(tmp_path, *(f"job-{owner}-{number:03d}" for number in range(MAX_PER_OWNER)), owner=owner)
    make(tmp_path, *(f"live-{number:03d}" for number in range(40)), owner=2000)
    slots = RunSlots(tmp_path, lives, clock=FakeClock().monotonic)
    assert sum(name.startswith("live") for name in names(slots, 20)) == 40
    assert slots.left_out == 0


@needs_root
def test_owners_share_the_slots_evenly(tmp_path: Path) -> None:
    """One who has many cannot leave another without; users of a GPU come first."""
    make(tmp_path, *(f"live-{number:03d}" for number in range(300)), owner=1001)
    for owner in (2000, 2001):
        make(tmp_path, f"live-z-{owner}", owner=owner)
    slots = RunSlots(tmp_path, lives, clock=FakeClock().monotonic)
    chosen = slots.look()
    assert len(chosen) == MAX_PER_OWNER
    assert {folder.name for folder, owner in chosen if owner != 1001} == {"live-z-2000", "live-z-2001"}
    assert slots.left_out == 2


@needs_root
def test_users_without_number_leave_those_who_use_gpus_their_slot(tmp_path: Path) -> None:
    """User namespaces give one user sixty thousand ids."""
    for number in range(200):
        make(tmp_path, f"live-{number:03d}", owner=100_000 + number)
    slots = RunSlots(tmp_path, lives, first=lambda: frozenset({500_000}), clock=FakeClock().monotonic)
    names(slots, 5)
    make(tmp_path, "live-zz", owner=500_000)
    assert "live-zz" in names(slots, 5)


@given(st.lists(st.integers(0, 50), max_size=10), st.integers(0, 100))
def test_shares_are_even(demands: list[int], total: int) -> None:
    """Nobody gets more than wanted, nothing is kept back, and who gets less than wanted gets as much as anybody."""
    given_out = fill(demands, total)
    assert all(0 <= share <= demand for share, demand in zip(given_out, demands, strict=True))
    assert sum(given_out) == min(total, sum(demands))
    short = [share for share, demand in zip(given_out, demands, strict=True) if share < demand]
    assert not short or min(short) >= max(given_out) - 1


def test_shares_are_those_of_owners() -> None:
    """Many runs give no more than one does."""
    assert fill_by_owner([(1, 100)] * 63 + [(2, 8)], 256)[-1] == 8


def test_an_allowance_comes_back_with_time() -> None:
    """Each user has an equal part of it; what one has spent is not another's."""
    allowance = Allowance(100, 10)
    allowance.begin(frozenset({1, 2}))
    assert allowance.take(1, 50, 0.0) and not allowance.take(1, 1, 0.0)
    assert allowance.take(2, 50, 0.0)
    assert not allowance.take(1, 6, 1.0) and allowance.take(1, 5, 1.0)


# What a user's folders may cost: entries and bytes of one look, and what of it is remembered.


class Crawling:
    """A clock on which each part of a look takes half of its time."""

    now = 0.0

    def __call__(self) -> float:
        self.now += SCAN_S / 2
        return self.now


@pytest.fixture
def shm() -> Iterator[Path]:
    """The root of runs in memory, where thousands of files are made in no time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="opsd-bounds-", dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def left_out(reading: Reading) -> dict[str, float]:
    return {sample.labels[0]: sample.value for sample in reading.samples if sample.metric is LEFT_OUT}


def pages(run: Path, count: int) -> None:
    """So many ranks that have files."""
    run.mkdir()
    for number in range(count):
        (run / f"rank-{10_000 + number}.page").touch()


def looked_at(shm: Path) -> float:
    """The ranks of which a collector has found files: those that it looks at and those that it leaves out."""
    collector = RanksCollector(shm, clock=Clock())
    reading = read(collector)
    errors = sum(sample.value for sample in reading.samples if sample.metric.name == "opsd_rank_page_errors")
    return errors + left_out(reading)["ranks"]


def test_the_root_is_read_a_part_at_a_time(shm: Path) -> None:
    """However many entries it has a look takes its time and no more; the next one goes on there."""
    for number in range(40):
        (shm / f"run-{number}").mkdir()
    for number in range(400):
        (shm / f"file-{number}").touch()
    slots = RunSlots(shm, lambda *_: True, clock=Crawling())
    found = [len(slots.look()) for _ in range(8)]
    assert found[0] < 40 and found[-1] == 40


def test_of_a_run_folder_so_many_entries_are_read(shm: Path) -> None:
    """Further ones are not even counted."""
    pages(shm / "r1", ENTRIES + 500)
    assert looked_at(shm) == ENTRIES


def test_a_user_with_many_runs_has_as_many_entries_read(shm: Path) -> None:
    """As one with a single run."""
    for run in range(4):
        pages(shm / f"r{run}", ENTRIES // 4 + 500)
    assert looked_at(shm) == ENTRIES


def test_a_user_with_many_runs_has_as_many_events_read(shm: Path) -> None:
    """In one look, however long the files are."""
    for number in range(8):
        run = shm / f"r{number}"
        run.mkdir()
        write_run(run, os.getpid())
        line = json.dumps({"t": 1.0, "event": "resumed", "filler": "x" * 4096}) + "\n"
        (run / "events.jsonl").write_text(line * (2 * EVENT_BYTES // 8 // len(line)))
    collector = RanksCollector(shm, clock=Clock())
    assert sum(event.size for event in read(collector).events) <= EVENT_BYTES


def test_what_is_remembered_of_events_has_an_end(shm: Path) -> None:
    """The rest is left out, which a metric and the state of the collector say."""
    run = shm / "r1"
    run.mkdir()
    write_run(run, os.getpid())
    line = json.dumps({"t": 1.0, "event": "resumed", "filler": "x" * (100 << 10)}) + "\n"
    collector, kept = RanksCollector(shm, clock=Clock()), 0
    for _ in range(2 * KEPT_BYTES // len(line)):
        with (run / "events.jsonl").open("a") as file:
            file.write(line)
        reading = read(collector)
        kept += sum(event.size for event in reading.events)
    assert 0 < kept <= KEPT_BYTES
    assert left_out(reading)["events"] == 1
    assert "events left out" in reading.limited


HARD_LINKS = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may read the other file")


# Files of others that a user links into a run, which root could read (anybody may where fs.protected_hardlinks is
# 0).


USER = 65_534

WARNING = b"node-1:1:1 [0] NCCL WARN secret\n"

EVENT = json.dumps({"t": 1.0, "event": "resumed", "secret": 1}).encode() + b"\n"

MODES = pytest.mark.parametrize("mode, told", [(0o600, False), (0o604, True)])


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def memory(top: Path) -> Path:
    """The user's run in shared memory, whose run folder is the user's as well."""
    (top / "run/flight_recorder").mkdir(parents=True)
    (top / "run/logs/gen-0002").mkdir(parents=True)
    memory = top / "shm/r1"
    memory.mkdir(parents=True)
    (memory / "rank-0000.page").touch()
    write_run(memory, 1, launcher_start=1, folder=str(top / "run"))
    for path in top.rglob("*"):
        os.chown(path, USER, USER)
    return memory


def link(place: Path, content: bytes, mode: int) -> None:
    """``place`` is a file of root's, which has ``mode``."""
    private = place.with_name(f"of-root-{place.name}")
    private.write_bytes(content)
    private.chmod(mode)
    place.unlink(missing_ok=True)
    place.hardlink_to(private)


@HARD_LINKS
@MODES
@pytest.mark.parametrize("name", ["events.jsonl", "rank-0000.page.events.jsonl"])
def test_events(memory: Path, name: str, mode: int, told: bool) -> None:
    """Of the launcher and of a rank."""
    link(memory / name, EVENT, mode)
    assert [event.kind for event in read(RanksCollector(memory.parent)).events] == ["resumed"] * told


@HARD_LINKS
@MODES
def test_the_description_of_a_run(memory: Path, mode: int, told: bool) -> None:
    """For the collector of ranks and for that of NCCL."""
    (memory / "rank-0000.page").rename(memory / "rank-0001.page")
    link(memory / "run.json", (memory / "run.json").read_bytes(), mode)
    assert len(runs(read(RanksCollector(memory.parent)))) == told
    assert len(of_nccl(NcclCollector(memory.parent, addresses=())).samples) == (5 if told else 1)


@HARD_LINKS
@MODES
def test_the_log_of_a_rank(memory: Path, top: Path, mode: int, told: bool) -> None:
    """A message in it would go to everybody."""
    (memory / "rank-0000.page").rename(memory / "rank-0001.page")  # a node that does not lead asks no RAS
    collector = NcclCollector(memory.parent)
    of_nccl(collector)
    link(top / "run/logs/gen-0002/rank-0001.log", WARNING, mode)
    assert [event.data["text"] for event in of_nccl(collector).events] == ["secret"] * told


@HARD_LINKS
@MODES
def test_a_flight_recorder_dump(memory: Path, top: Path, mode: int, told: bool) -> None:
    """It cannot be used either way, and the agent says for which of two reasons."""
    collector = NcclCollector(memory.parent, addresses=[("127.0.0.1", 1)])
    of_nccl(collector)
    link(top / "run/flight_recorder/rank-0000.json", b"secret", mode)
    (event,) = of_nccl(collector).events
    assert ("not a flight recorder dump" if told else "not a regular file") in event.data["why"]


def of_nccl(collector: NcclCollector) -> Reading:
    reading = collector.collect()
    assert isinstance(reading, Reading)
    return reading


# Following event files: every line once whatever the cuts, and nothing that a hostile owner can do with the file.


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


ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


# Files that a user names are opened as the kernel would for that user.


ME, OTHER, GROUP = 4001, 4002, 5001

RIGHTS = Rights(ME, frozenset({GROUP}))


@pytest.fixture
def reachable(tmp_path: Path) -> Path:
    """A folder that everybody reaches."""
    folder = tmp_path / "reachable"
    folder.mkdir()
    for path in (folder, *folder.parents):
        if path.stat().st_uid == 0 and path != Path("/") and not path.stat().st_mode & 1:
            path.chmod(0o755)
    return folder


def put(path: Path, mode: int, owner: int = 0, group: int = 0) -> Path:
    path.write_text("content")
    os.chown(path, owner, group)
    path.chmod(mode)
    return path


def opens(path: Path | str, flags: int = os.O_RDONLY, rights: Rights = RIGHTS) -> bool:
    try:
        os.close(open_as(rights, str(path), flags))
    except OSError:
        return False
    return True


@ONLY_ROOT
@pytest.mark.parametrize(
    ("mode", "owner", "group", "may"),
    [
        (0o400, ME, 0, True), (0o044, ME, GROUP, False), (0o040, 0, GROUP, True), (0o604, 0, GROUP, False),
        (0o604, 0, 0, True), (0o640, OTHER, 0, False), (0o600, 0, 0, False),
    ],
)  # fmt: skip
def test_the_mode_decides(reachable: Path, mode: int, owner: int, group: int, may: bool) -> None:
    """The first of owner, group and others that applies, as in acl(5)."""
    assert opens(put(reachable / "file", mode, owner, group)) is may
    assert opens(reachable / "file", rights=Rights(0, frozenset()))


@ONLY_ROOT
def test_every_folder_on_the_way_has_to_let_the_user_pass(reachable: Path) -> None:
    """By whatever path: links, also absolute ones, and dots lead nowhere else."""
    closed = reachable / "closed"
    closed.mkdir(mode=0o700)
    put(closed / "file", 0o644)
    (reachable / "link").symlink_to("closed/file")
    (reachable / "absolute").symlink_to(closed / "file")
    (reachable / "loop").symlink_to("loop")
    assert not any(opens(reachable / name) for name in ("closed/file", "link", "absolute", "loop", "closed/../open"))
    put(reachable / "open", 0o644)
    (closed / "out").symlink_to("../open")
    closed.chmod(0o711)
    assert all(opens(reachable / name) for name in ("closed/file", "link", "absolute", "closed/out", "closed/../open"))
    assert not opens(reachable / "link", os.O_RDONLY | os.O_NOFOLLOW)


@ONLY_ROOT
def test_what_the_agent_has_open_is_no_way_in(reachable: Path) -> None:
    """Links of /proc are read as text."""
    with put(reachable / "secret", 0o600).open() as secret:
        assert not opens(f"/proc/self/fd/{secret.fileno()}")


@ONLY_ROOT
@pytest.mark.parametrize(
    ("entries", "may"),
    [
        ([(0x02, 4, ME), (0x10, 4, 0)], True),
        ([(0x02, 4, ME), (0x10, 0, 0)], False),
        ([(0x02, 0, ME), (0x10, 7, 0)], False),
        ([(0x08, 4, GROUP), (0x10, 7, 0)], True),
        ([(0x08, 0, GROUP), (0x10, 7, 0)], False),
        ([(0x02, 4, OTHER), (0x10, 7, 0)], True),
    ],
)
def test_access_control_lists_decide(reachable: Path, entries: list[tuple[int, int, int]], may: bool) -> None:
    """A named user, then groups, then others; all but others through the mask."""
    path = put(reachable / "file", 0o604)
    every = sorted([*entries, (0x01, 6, 0xFFFFFFFF), (0x04, 0, 0xFFFFFFFF), (0x20, 4, 0xFFFFFFFF)])
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, bits, who if tag in (0x02, 0x08) else 0xFFFFFFFF) for tag, bits, who in every
    )
    try:
        os.setxattr(path, "system.posix_acl_access", acl)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    assert opens(path) is may


@ONLY_ROOT
def test_groups_are_those_of_a_process_of_the_user() -> None:
    """Of no other user's."""
    assert groups_of_process(os.getpid(), os.getuid()) >= {os.getgid()}
    assert groups_of_process(os.getpid(), ME) == frozenset()
