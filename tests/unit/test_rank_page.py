"""The rank page: what a rank writes is what others read, also of programs that report nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.client import PAGE_BYTES, PHASES, RING_STEPS, SOURCES, Reporter, events_path
from opsd.collectors.ranks import RanksCollector
from opsd.launch.ranks.ranks import usable_pages
from opsd.rank_page import PageError, RankPage, process_state, read_page, write_request
from tests.fakes.run_folder import ranks, read, values, write_run
from tests.fakes.tree import ROOT

# The rank page: what a rank writes is what others read, whatever happens to either side.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0000.page"


def test_identity_is_readable(path: Path) -> None:
    """A page says which rank of which run wrote it."""
    Reporter(path, rank=3, local_rank=1, world_size=8, generation=2, gpu=1, node="n7", job="42", run="smol")
    page = read_page(path)
    assert (page.rank, page.local_rank, page.world_size, page.generation, page.gpu) == (3, 1, 8, 2, 1)
    assert (page.node, page.job, page.run, page.pid) == ("n7", "42", "smol", os.getpid())
    assert (page.state, page.phase, page.last_step, page.committed_step) == ("running", "setup", None, None)


def test_gpu_may_be_absent(path: Path) -> None:
    """No GPU is None, not GPU 0."""
    Reporter(path)
    assert read_page(path).gpu is None


def test_step_carries_its_numbers_and_phase_times(path: Path) -> None:
    """A completed step has loss, norm and tokens, and its phases add up to its duration."""
    reporter = Reporter(path)
    reporter.step(step=9)
    with reporter.phase("data"):
        time.sleep(0.01)
    with reporter.phase("forward"):
        time.sleep(0.005)
    reporter.step(tokens=512, loss=2.5, grad_norm=0.7, learning_rate=3e-4)
    last = read_page(path).last_step
    assert last is not None
    assert (last.step, last.tokens, last.loss, last.grad_norm, last.learning_rate) == (10, 512, 2.5, 0.7, 3e-4)
    assert last.phase("data") >= 0.01
    assert sum(last.phase_s) == pytest.approx(last.duration_s, abs=1e-6)


def test_a_page_from_before_learning_rates_has_none(path: Path) -> None:
    """What an older release left at its place is not a learning rate of 0."""
    reporter = Reporter(path)
    reporter.step(loss=2.5)
    with open(path, "r+b") as file:
        header = bytearray(file.read(448))
        struct.pack_into("<H", header, 10, 1)
        header_bytes = struct.calcsize("<8sHHIIIIIiQQQQ64s64s64s")
        struct.pack_into("<I", header, header_bytes, zlib.crc32(header[:header_bytes]))
        file.seek(0)
        file.write(header)
        file.seek(2048 + 152)
        file.write(bytes(8))
    (step,) = read_page(path).steps
    assert step.loss == 2.5
    assert step.learning_rate is None


@pytest.mark.parametrize("source", SOURCES)
def test_a_page_says_who_reports(path: Path, source: str) -> None:
    """Judges know whether the program itself reports, an adapter, or the launcher's hooks."""
    Reporter(path, source=source)
    assert read_page(path).source == source


def test_a_page_from_before_sources_is_the_programs_own(path: Path) -> None:
    """An older client wrote nothing at that place: it was the program that reported."""
    Reporter(path, source="observed")
    with open(path, "r+b") as file:
        file.seek(464)
        file.write(bytes(4))
    assert read_page(path).source == "client"
    assert not read_page(path).observed


def test_nested_phase_returns_to_the_outer_one(path: Path) -> None:
    """Leaving an inner phase resumes the outer one, also when it is left by an exception."""
    reporter = Reporter(path)
    with reporter.phase("backward"):
        with pytest.raises(RuntimeError), reporter.phase("collective"):
            assert read_page(path).phase == "collective"
            raise RuntimeError
        assert read_page(path).phase == "backward"


def test_timed_marks_the_wait_for_each_item(path: Path) -> None:
    """Iterating through ``timed`` is in the phase while waiting and out of it while working."""
    reporter = Reporter(path)
    reporter.step()
    seen = []

    def source() -> object:
        for _ in range(2):
            seen.append(read_page(path).phase)
            yield None

    for _ in reporter.timed("data", source()):
        seen.append(read_page(path).phase)
    assert seen == ["data", "other", "data", "other"]


@given(count=st.integers(0, 3 * RING_STEPS), tokens=st.integers(0, 2**40))
@settings(max_examples=25, deadline=None)
def test_ring_keeps_the_newest_steps(count: int, tokens: int) -> None:
    """After any number of steps the page holds the last ones in order, and the total of all tokens.

    But for the one in whose place the next comes: that may be being written.
    """
    path = Path("/dev/shm") / f"opsd-test-{os.getpid()}.page"
    try:
        reporter = Reporter(path)
        for _ in range(count):
            reporter.step(tokens=tokens)
        page = read_page(path)
    finally:
        path.unlink(missing_ok=True)
    assert [step.step for step in page.steps] == list(range(max(1, count - RING_STEPS + 2), count + 1))
    assert page.tokens == count * tokens
    assert page.steps_reported == count


@given(looks=st.lists(st.integers(0, RING_STEPS + 5), max_size=8), restarts=st.sets(st.integers(0, 7)))
@settings(max_examples=25, deadline=None)
def test_a_reader_that_knows_an_earlier_copy_sees_the_same(looks: list[int], restarts: set[int]) -> None:
    """Steps taken over from it are those that would be decoded, whatever came between, of any writer."""
    path = Path("/dev/shm") / f"opsd-test-{os.getpid()}.page"
    try:
        reporter, known = Reporter(path), None
        for number, steps in enumerate(looks):
            if number in restarts:
                reporter = Reporter(path)
            for _ in range(steps):
                reporter.step(tokens=7)
            page = read_page(path, known)
            assert repr(page) == repr(read_page(path))
            assert repr(page.steps) == repr(read_page(path).steps)
            known = page
    finally:
        path.unlink(missing_ok=True)


def test_steps_known_already_are_not_made_again(path: Path) -> None:
    """A reader that looks every second at a rank with slow steps pays for the new ones only."""
    reporter = Reporter(path)
    for _ in range(3):
        reporter.step()
    known = read_page(path)
    reporter.step()
    page = read_page(path, known)
    assert [new is old for new, old in zip(page.steps, known.steps, strict=False)] == [True] * 3
    assert len(page.steps) == 4


def test_stop_request_reaches_the_rank(path: Path) -> None:
    """The launcher's request is visible to the rank and to readers."""
    reporter = Reporter(path)
    assert not reporter.stop_requested
    write_request(path, "checkpoint_and_stop")
    assert reporter.stop_requested
    assert read_page(path).request == "checkpoint_and_stop"


def test_workers_come_and_go(path: Path) -> None:
    """Helper processes are listed until removed; a ninth one is left out and harms nothing."""
    reporter = Reporter(path)
    for pid in range(1, 10):
        reporter.add_worker(pid, "data")
    reporter.remove_worker(4)
    assert [pid for pid, role in read_page(path).workers if role == "data"] == [1, 2, 3, 5, 6, 7, 8]


def test_finished_and_committed_are_told(path: Path) -> None:
    """An orderly end and the newest durable checkpoint are part of the page."""
    reporter = Reporter(path)
    reporter.checkpoint_committed(120)
    reporter.close()
    page = read_page(path)
    assert (page.committed_step, page.state) == (120, "finished")


def test_events_are_lines_beside_the_page(path: Path) -> None:
    """Rare events are JSON lines that survive the rank."""
    Reporter(path).event("checkpoint_rejected", step=5, file="a.bin")
    assert '"event": "checkpoint_rejected", "step": 5, "file": "a.bin"' in events_path(path).read_text()


WRITER = """
import sys, time
from opsd.client import Reporter
reporter = Reporter(sys.argv[1], rank=1)
data = reporter.phase("data")
print("ready", flush=True)
while True:
    with data:
        pass
    reporter.step(tokens=1, loss=1.0)
"""


@pytest.fixture
def busy_writer(path: Path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_reader_never_sees_a_torn_page(path: Path, busy_writer: subprocess.Popen[str]) -> None:
    """Against a writer at full speed every read is consistent and time does not run backwards."""
    newest = reads = 0
    while reads < 3000 or newest < 1000:  # on a machine under load the writer may not get its turn at first
        reads += 1
        page = read_page(path)
        assert page.phase in ("setup", "data", "other")
        assert page.steps_reported >= newest
        newest = page.steps_reported
        steps = [step.step for step in page.steps]
        assert steps == sorted(set(steps))


def test_page_of_a_stopped_and_of_a_killed_rank(path: Path, busy_writer: subprocess.Popen[str]) -> None:
    """A page is readable whatever became of its writer, and the kernel's view of the writer is part of the picture."""
    os.kill(busy_writer.pid, signal.SIGSTOP)
    os.waitpid(busy_writer.pid, os.WUNTRACED)
    assert process_state(read_page(path)) == "T"
    busy_writer.kill()
    busy_writer.wait()
    page = read_page(path)
    assert page.rank == 1
    assert process_state(page) is None


def test_writer_killed_inside_a_slot_leaves_the_other(path: Path) -> None:
    """A slot whose two sequence numbers differ is ignored in favour of the older whole one."""
    reporter = Reporter(path)
    with reporter.phase("data"):
        pass
    with open(path, "r+b") as file:  # sequence 3 lies in slot 1; break its closing number
        file.seek(1280)
        file.write(struct.pack("<Q", 99))
    assert read_page(path).phase == "data"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:100], "100 bytes long"),
        (lambda data: b"", "0 bytes long"),
        (lambda data: b"x" * PAGE_BYTES, "not a rank page"),
        (lambda data: data[:8] + struct.pack("<H", 7) + data[10:], "layout version 7"),
        (lambda data: data[:16] + b"\xff" + data[17:], "does not match its checksum"),
        (lambda data: data[:1024] + bytes(1024) + data[2048:], "no slot of the page is whole"),
    ],
)
def test_unusable_pages_are_refused_in_one_sentence(path: Path, damage, says: str) -> None:
    """Truncated, foreign, newer and damaged pages raise PageError that says what is wrong."""
    Reporter(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PageError, match=says):
        read_page(path)


def test_missing_page_and_symlink_are_refused(path: Path, tmp_path: Path) -> None:
    """A reader that may be root follows no links."""
    with pytest.raises(PageError, match="cannot be opened"):
        read_page(path)
    target = tmp_path / "real.page"
    Reporter(target)
    path.symlink_to(target)
    with pytest.raises(PageError, match="cannot be opened"):
        read_page(path)


@given(seed=st.integers(0, 2**32), at=st.integers(272, PAGE_BYTES - 1))
@settings(max_examples=50, deadline=None)
def test_noise_behind_the_header_never_crashes_the_reader(seed: int, at: int) -> None:
    """Whatever bytes follow a good header, reading gives a page or a PageError."""
    path = Path("/dev/shm") / f"opsd-test-noise-{os.getpid()}.page"
    try:
        Reporter(path)
        path.write_bytes(path.read_bytes()[:at] + random.Random(seed).randbytes(PAGE_BYTES - at))
        with contextlib.suppress(PageError):
            assert read_page(path).phase in PHASES
    finally:
        path.unlink(missing_ok=True)


def test_training_goes_on_without_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no page can be created, the reporter says so once and works on."""
    reporter = Reporter(tmp_path / "missing" / "rank-0000.page")
    with reporter.phase("data"):
        pass
    reporter.step(tokens=1)
    assert "runs unobserved" in capsys.readouterr().err


def test_from_env_without_a_launcher() -> None:
    """A program that is not started by opsd can use the reporter all the same."""
    reporter = Reporter.from_env()
    reporter.step()
    assert not reporter.stop_requested
    reporter.event("nothing")


@pytest.mark.parametrize("name", ["README.md", "docs/launch.md", "docs/tutorial-torchrun.md", "opsd/client.py"])
def test_every_example_gives_the_number_of_the_step(name: str) -> None:
    """Without it the steps of a run begin again at 1 after a restart."""
    calls = re.findall(r"^ *reporter\.step\(.*", (ROOT / name).read_text(), re.MULTILINE)
    assert calls and all("step=step" in call for call in calls)


def test_a_page_that_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In shared memory that is full every start of every rank would leave a draft."""

    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    Reporter(tmp_path / "rank-0000.page").close()
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_made_stops_no_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder is none, is not there, or may not be written to: the rank runs unobserved and says so."""
    (tmp_path / "file").touch()
    for place in ("file/rank-0000.page", "none/rank-0000.page"):
        reporter = Reporter(tmp_path / place)
        reporter.step(step=1)
        reporter.close()
        assert "runs unobserved" in capsys.readouterr().err


# What others make of the page of a program that reports nothing itself.


@dataclass
class FakeRank:
    """A rank of a generation with its page."""

    rank: int
    path: Path

    def page(self) -> RankPage | None:
        return read_page(self.path) if self.path.exists() else None


def rank_with_page(folder: Path, rank: int, source: str | None) -> FakeRank:
    path = folder / f"rank-{rank:04d}.page"
    if source is not None:
        Reporter(path, rank=rank, source=source).step()
    return FakeRank(rank, path)


def test_ranks_that_report_themselves_keep_the_word(tmp_path: Path) -> None:
    """A program whose first rank reports may count its steps from another number than the hooks do in the others."""
    sources = ["client", "observed", "adapter", None]
    pages = usable_pages([rank_with_page(tmp_path, rank, source) for rank, source in enumerate(sources)])
    assert sorted(pages) == [0, 2]


def test_observed_pages_are_used_where_nobody_reports(tmp_path: Path) -> None:
    """As in most programs."""
    sources = ["observed", "observed", None]
    pages = usable_pages([rank_with_page(tmp_path, rank, source) for rank, source in enumerate(sources)])
    assert sorted(pages) == [0, 1]


def test_tokens_that_are_not_known_are_no_throughput_of_0(tmp_path: Path) -> None:
    """An observed rank has steps and phases, and no series of tokens."""
    folder = tmp_path / "r1"
    folder.mkdir()
    page = Reporter(folder / "rank-0000.page", run="r1", source="observed")
    page.step(step=7, learning_rate=0.5)
    write_run(folder, os.getpid())
    reading = read(RanksCollector(tmp_path))
    assert [rank.source for rank in ranks(reading)] == ["observed"]
    names = {name for name, *_ in values(reading)}
    assert {"opsd_rank_step", "opsd_rank_step_seconds", "opsd_rank_phase", "opsd_rank_learning_rate"} <= names
    assert not {"opsd_rank_tokens_total", "opsd_rank_tokens_per_second", "opsd_rank_loss"} & names
