"""What ranks print: never in their way, whole lines on the console, everything in files as long as there is room."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from opsd.launch.io import reporting
from opsd.launch.io.console import STDERR, STDOUT, Console, RankOutput, Routing
from opsd.launch.io.streams import LONGEST, LogFile, Mixer, Spool, Stream
from opsd.launch.ranks.settings import Streams, own_gpu_only
from tests.fakes.clock import until
from tests.fakes.tree import tmpfs

PLAIN = {STDOUT: Routing(), STDERR: Routing()}


# -- spool -----------------------------------------------------------------------------------------------------------


def test_each_reader_of_a_spool_gets_everything() -> None:
    """Readers go at their own pace, and what all have read is given back to the system."""
    spool = Spool("test")
    slow, fast = spool.reader(), spool.reader()
    data = os.urandom(5 << 20)
    os.write(spool.descriptor, data)
    assert fast.read(len(data)) == data
    assert slow.read(len(data) // 2) + slow.read(len(data)) == data
    assert os.fstat(spool.descriptor).st_blocks * 512 < 2 << 20
    assert slow.lost == fast.lost == 0


def test_reader_that_stands_still_loses_the_oldest_and_is_told() -> None:
    """Memory is bounded; who comes late gets the newest, and the number of bytes that are gone."""
    spool = Spool("test", kept=2 << 20)
    late, other = spool.reader(), spool.reader()
    for number in range(10):
        os.write(spool.descriptor, bytes([number]) * (1 << 20))
        other.read(1 << 20)
    assert os.fstat(spool.descriptor).st_blocks * 512 < 4 << 20
    data = late.read(20 << 20)
    assert 1 << 20 <= len(data) <= 2 << 20
    assert set(data[-1 << 20 :]) == {9}
    assert late.take_lost() == (10 << 20) - len(data)
    assert late.take_lost() == 0


def test_spool_nobody_reads_is_trimmed() -> None:
    """When all readers stand still, somebody else sees to the limit."""
    spool = Spool("test", kept=1 << 20)
    spool.reader()
    for _ in range(8):
        os.write(spool.descriptor, b"x" * (1 << 20))
    spool.trim()
    assert os.fstat(spool.descriptor).st_blocks * 512 <= 2 << 20


def test_program_that_opens_its_output_again() -> None:
    """``echo > /dev/stderr`` empties what is there, as it does with a file; what comes after is read."""
    spool = Spool("test")
    reader = spool.reader()
    os.write(spool.descriptor, b"before, and longer\n")
    assert reader.read(100)
    with open(f"/proc/self/fd/{spool.descriptor}", "w") as again:
        again.write("after\n")
    assert reader.read(100) == b"after\n"


# -- mixer -----------------------------------------------------------------------------------------------------------


def shown(*parts: tuple[Stream, bytes]) -> bytes:
    """What a mixer shows of parts that come one after the other; an empty one stands for a pause."""
    mixer = Mixer()
    return b"".join(mixer.feed(stream, data) if data else mixer.quiet(stream) for stream, data in parts)


def test_lines_of_two_streams_do_not_tear_each_other() -> None:
    """A line is shown once it is whole, with its prefix."""
    a, b = Stream(b"a: "), Stream(b"b: ")
    assert shown((a, b"one "), (b, b"two\nthr"), (a, b"more\n"), (b, b"ee\n")) == b"b: two\na: one more\nb: three\n"


def test_line_that_is_shown_in_parts_is_ended_for_another() -> None:
    """A prompt or a row of dots is shown when nothing more comes; another stream's line begins below it."""
    a, b = Stream(b"a: "), Stream(b"b: ")
    parts = ((a, b".."), (a, b""), (a, b".\n"), (a, b".."), (a, b""), (b, b"x\n"), (a, b".\n"))
    assert shown(*parts) == b"a: ...\na: ..\nb: x\na: .\n"


def test_progress_bars_move() -> None:
    """A frame after a carriage return is shown as soon as the next one comes, or when it is the last for a while."""
    bar = Stream(b"a: ")
    assert shown((bar, b"\r10%"), (bar, b"\r20%")) == b"a: \ra: 10%\r"
    bar = Stream(b"a: ")
    assert shown((bar, b"\r10%"), (bar, b"")) == b"a: \ra: 10%"
    bare = Stream()
    assert shown((bare, b"\r10%"), (bare, b"\r20%"), (bare, b""), (bare, b"\n")) == b"\r10%\r20%\n"


def test_line_after_a_progress_bar_of_another_stream() -> None:
    """It does not overwrite the bar."""
    bar, text = Stream(), Stream()
    assert shown((bar, b"10%\r20%"), (text, b"loss\n"), (bar, b"\r30%\n")) == b"10%\r\nloss\n20%\r30%\n"


@pytest.mark.parametrize("text", [b"a\r\nb\r\n", b"\r\n\r\n"])
def test_windows_lines_are_lines(text: bytes) -> None:
    """A carriage return before a line feed is a part of it, also where they come apart."""
    lines = text.count(b"\n")
    for cut in range(len(text) + 1):
        stream = Stream(b"p: ")
        found = shown(*[(stream, part) for part in (text[:cut], text[cut:]) if part])
        assert found.count(b"p: ") == lines
        assert found.replace(b"p: ", b"") == text


def test_nothing_is_lost_of_binary_output() -> None:
    """However it is cut, one stream without prefix comes out as it went in."""
    chance = random.Random(5)
    data = bytes(chance.choice(b"\x00\xff\r\n ab") for _ in range(5000))
    mixer, stream, out, at = Mixer(), Stream(), b"", 0
    while at < len(data):
        size = chance.randrange(1, 40)
        out += mixer.feed(stream, data[at : at + size])
        at += size
        if chance.random() < 0.2:
            out += mixer.quiet(stream)
    assert out + mixer.quiet(stream) == data


def test_endless_line_is_passed_on_in_parts() -> None:
    """A line of many megabytes is not gathered in memory."""
    mixer, stream, total = Mixer(), Stream(b"p: "), b""
    for _ in range(40):
        total += mixer.feed(stream, b"x" * (1 << 18))
        assert len(stream.pending) <= LONGEST
    assert total.count(b"p: ") == 1
    assert mixer.amid_line(stream)


# -- log files -------------------------------------------------------------------------------------------------------


def test_log_is_rotated_when_it_is_full(tmp_path: Path) -> None:
    """Three files are kept, the newest without a number; a line is in one of them only."""
    log = LogFile(tmp_path / "logs/a.log", 100)
    for number in range(12):
        log.write(b"%02d" % number + b"x" * 37 + b"\n")
    log.close()
    files = {path.name: path.read_bytes().count(b"\n") for path in (tmp_path / "logs").iterdir()}
    assert files == {"a.log": 2, "a.log.1": 2, "a.log.2": 2}
    assert (tmp_path / "logs/a.log").read_bytes().startswith(b"10x")


def test_log_without_limit(tmp_path: Path) -> None:
    """With 0 there is one file of any size."""
    log = LogFile(tmp_path / "a.log", 0)
    for _ in range(10):
        log.write(b"x" * 1000)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [10_000]


def test_logs_leave_room_on_their_disk(tmp_path: Path) -> None:
    """What a run cannot go on without, as the claim of its next generation, finds room when logs find none."""
    with tmpfs(tmp_path, "size=4m"):
        logs = [LogFile(tmp_path / f"{rank}.log", 0) for rank in range(4)]
        for _ in range(100):
            for log in logs:
                log.write(b"x" * 20_000)
        (tmp_path / "claim").write_bytes(b"x" * 50_000)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.log")) > 3 << 20
        for log in logs:
            log.close()
    reporting.flush(20)  # what was said of it is not in the next test's output


def test_disk_that_is_full_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    """What cannot be written is left out, and nothing is raised."""
    log = LogFile(Path("/dev/full"), 0)
    for _ in range(3):
        log.write(b"line\n")
    reporting.flush(20)
    assert capfd.readouterr().err.count("No space left on device") == 1


# -- console ---------------------------------------------------------------------------------------------------------


def test_stdout_and_stderr_stay_apart(tmp_path: Path) -> None:
    """Each goes to its own; the log has both."""
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        console, output = Console(out.fileno(), err.fileno()), RankOutput(0)
        console.follow(output, tmp_path / "rank-0000.log", PLAIN)
        os.write(output.descriptors[0], b"result\n")
        until(lambda: (tmp_path / "out").read_bytes() == b"result\n")
        os.write(output.descriptors[1], b"warning\n")
        console.close()
    assert (tmp_path / "out").read_bytes() == b"result\n"
    assert (tmp_path / "err").read_bytes() == b"warning\n"
    assert (tmp_path / "rank-0000.log").read_bytes() == b"result\nwarning\n"


def test_stream_with_a_file_of_its_own_that_is_not_shown(tmp_path: Path) -> None:
    """A redirected stream is in its file and in the log, and not on the console."""
    show = {STDOUT: Routing(), STDERR: Routing(shown=False, own_file=True)}
    with (tmp_path / "out").open("wb") as out:
        console, output = Console(out.fileno(), out.fileno()), RankOutput(0)
        console.follow(output, tmp_path / "rank-0000.log", show)
        os.write(output.descriptors[0], b"result\n")
        os.write(output.descriptors[1], b"warning\n")
        console.close()
    assert (tmp_path / "out").read_bytes() == b"result\n"
    assert (tmp_path / "rank-0000.stderr.log").read_bytes() == b"warning\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rank-0000.log", "rank-0000.stderr.log"]
    assert b"warning\n" in (tmp_path / "rank-0000.log").read_bytes()


def test_two_long_lines_do_not_tear_each_other(tmp_path: Path) -> None:
    """Of two ranks that print a line of ten megabytes each at the same time, one comes after the other."""
    with (tmp_path / "out").open("wb") as out:
        console = Console(out.fileno(), out.fileno())
        outputs = [RankOutput(rank) for rank in range(2)]
        for rank, output in enumerate(outputs):
            os.write(output.descriptors[0], b"%d" % rank * (10 << 20) + b"\n")
            console.follow(output, tmp_path / f"{rank}.log", PLAIN)
        console.close(20)
    assert [line[:1] + line[-1:] for line in (tmp_path / "out").read_bytes().splitlines()] == [b"00", b"11"]


def test_console_that_stands_still_holds_up_nobody(tmp_path: Path) -> None:
    """A pipe that nobody reads: the rank prints on, and its log has it all."""
    reader, writer = os.pipe()
    console, output = Console(writer, writer), RankOutput(0)
    console.follow(output, tmp_path / "0.log", PLAIN)
    for _ in range(100):
        os.write(output.descriptors[0], b"x" * 65_535 + b"\n")
    until(lambda: (tmp_path / "0.log").exists() and (tmp_path / "0.log").stat().st_size == 100 * 65_536)
    assert output.tail(1) == "x" * 8191
    os.close(reader)
    console.close()
    os.close(writer)


def test_console_that_is_gone_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A closed pipe ends the copying to it, with a word; the other stream and the log go on."""
    reader, writer = os.pipe()
    os.close(reader)
    with (tmp_path / "err").open("wb") as err:
        console, output = Console(writer, err.fileno()), RankOutput(0)
        console.follow(output, tmp_path / "0.log", PLAIN)
        os.write(output.descriptors[0], b"text\n")
        os.write(output.descriptors[1], b"error\n")
        console.close()
    os.close(writer)
    reporting.flush(20)
    assert capfd.readouterr().err.count("see the logs") == 1
    assert (tmp_path / "err").read_bytes() == b"error\n"


def test_non_blocking_console_is_waited_for(tmp_path: Path) -> None:
    """Another program may have made the terminal non-blocking; that costs no output."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(reader, True)
    console, output, got = Console(writer, writer), RankOutput(0), bytearray()
    console.follow(output, tmp_path / "0.log", PLAIN)
    os.write(output.descriptors[0], b"x" * 1_000_000 + b"\n")

    def read() -> None:
        while len(got) < 1_000_001:
            got.extend(os.read(reader, 4096))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(20)
    console.close()
    assert len(got) == 1_000_001
    os.close(reader)
    os.close(writer)


def test_slow_reader_gets_everything_at_the_end(tmp_path: Path) -> None:
    """Who goes on reading is waited for when the run is over, longer than who stands still."""
    reader, writer = os.pipe()
    console, output, got = Console(writer, writer), RankOutput(0), bytearray()
    console.follow(output, tmp_path / "0.log", PLAIN)
    os.write(output.descriptors[0], b"x" * 4_000_000)

    def read() -> None:
        while data := os.read(reader, 65_536):
            got.extend(data)
            time.sleep(0.02)

    thread = threading.Thread(target=read)
    thread.start()
    console.close(0.8)
    os.close(writer)
    thread.join(20)
    assert len(got) == 4_000_000
    os.close(reader)


def test_tail_is_there_before_it_is_in_the_log() -> None:
    """A post-mortem has the last lines although nothing has been written anywhere yet."""
    output = RankOutput(0)
    os.write(output.descriptors[0], b"".join(b"line %d\n" % number for number in range(2000)))
    os.write(output.descriptors[1], b"Traceback\nValueError: no\n")
    assert output.tail(3).splitlines() == ["line 1999", "Traceback", "ValueError: no"]


# -- torchrun's flags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("streams", "stdout", "stderr"),
    [
        (Streams(), Routing(), Routing()),
        (Streams({None: 3}), Routing(False, own_file=True), Routing(False, own_file=True)),
        (Streams({0: 1, 1: 2}), Routing(), Routing(False, own_file=True)),
        (Streams({None: 3}, {1: 1}), Routing(True, "[rank5]: ", True), Routing(False, own_file=True)),
        (Streams(tee={None: 2}), Routing(), Routing(True, "[rank5]: ", True)),
        (Streams(chosen=frozenset({0})), Routing(False), Routing(False)),
        (Streams(tee={1: 3}, prefix="${role_name}${local_rank}|"), *[Routing(True, "trainer1|", True)] * 2),
    ],
)
def test_flags_say_what_is_done_with_each_stream(streams: Streams, stdout: Routing, stderr: Routing) -> None:
    """``-r``, ``-t`` and the filter of local ranks, as local rank 1 of the role trainer, rank 5, sees them."""
    names = {"rank": 5, "local_rank": 1, "role_name": "trainer"}
    assert [streams.show(stream, 1, names) for stream in (STDOUT, STDERR)] == [stdout, stderr]


@pytest.mark.parametrize(("visible", "own"), [("4,5,6", "6"), (None, "2"), ("GPU-a, GPU-b,GPU-c", "GPU-c")])
def test_virtual_local_rank_sees_its_own_gpu_as_the_first(visible: str | None, own: str) -> None:
    """As under torchrun: device 0 of one, LOCAL_RANK 0; opsd still knows which GPU of the node it is."""
    environment = {"LOCAL_RANK": "2", "OPSD_GPU": "6", "A": "b"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    expected = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": own, "OPSD_GPU": "6", "A": "b"}
    assert own_gpu_only(environment, 2) == expected
