"""The output of the ranks: to the console, and to their log files.

Ranks write into memory (``Spool``). One thread copies it to the console and another to the files. So a blocked reader,
a full disk or a hanging file server delays neither the ranks nor the launcher.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opsd.launch.io.reporting import print_message, write_all
from opsd.launch.io.streams import LogFile, Mixer, Reader, Spool, Stream, missing

STDOUT, STDERR = 1, 2
LOG_BYTES = 64 << 20
_CHUNK = 1 << 18
_IN_ONE_GO = 64 << 20
"""Bytes of one long line for which other streams wait."""
_TAIL_BYTES = 8192
INTERVAL_S = 0.05
CLOSE_S = 60.0
"""Time at the end for a reader that is slow but makes progress."""
LINGER_S = 60.0
"""How long the output of processes that outlive their rank, to finish a checkpoint, is still copied."""
QUIET_S = 0.1
"""An incomplete line is shown after so long without more of it."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a stream of a rank goes: ``shown`` on the console after ``prefix``, ``own_file`` besides the log."""

    shown: bool = True
    prefix: str = ""
    own_file: bool = False


class RankOutput:
    """The output of one rank. ``descriptors`` are its stdout and stderr, to be closed once it has them."""

    def __init__(self, rank: int) -> None:
        self._spools = {STDOUT: Spool(f"rank-{rank}-stdout"), STDERR: Spool(f"rank-{rank}-stderr")}
        self._readers = {stream: spool.reader() for stream, spool in self._spools.items()}
        self._lock = threading.Lock()
        self._recent = b""

    @property
    def descriptors(self) -> tuple[int, int]:
        """The rank's stdout and stderr."""
        return self._spools[STDOUT].descriptor, self._spools[STDERR].descriptor

    def tail(self, lines: int) -> str:
        """The last ``lines`` lines, including those not in a file yet."""
        with self._lock:
            text = self._recent + b"".join(reader.peek(_TAIL_BYTES) for reader in self._readers.values())
        return "\n".join(text[-_TAIL_BYTES:].decode(errors="replace").splitlines()[-lines:])

    def reader(self, stream: int) -> Reader:
        """Another reader of a stream, from its beginning."""
        return self._spools[stream].reader()

    def new(self) -> list[tuple[int, bytes, int]]:
        """The data of each stream since the last call, with the number of bytes lost before it."""
        with self._lock:
            found = [(stream, reader.read(_CHUNK), reader.take_lost()) for stream, reader in self._readers.items()]
            for _, data, _ in found:
                self._recent = (self._recent + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        return found

    def trim(self) -> None:
        """Limit the memory used, however slow the readers are."""
        for spool in self._spools.values():
            spool.trim()

    def close(self) -> None:
        """Read no more for the files."""
        for reader in self._readers.values():
            reader.close()


class _Sink(ABC):
    """Copies output to one place."""

    until: float | None = None
    """When it may be finished, on the monotonic clock; None while its ranks run."""

    @abstractmethod
    def pull(self) -> bool:
        """Copy what is new; False if nothing is."""

    @property
    def mid_line(self) -> bool:
        """Whether it should be pulled again before the others, since it is in the middle of a line."""
        return False

    @abstractmethod
    def finish(self) -> None:
        """Flush and close."""


class _SinkThread:
    """A thread that pulls sinks until they are finished; a blocked one holds up this thread only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sinks: list[_Sink] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._moved = time.monotonic()

    def follow(self, follower: _Sink) -> None:
        """Pull the sink from now on. Raises OSError if no thread can be started."""
        with self._lock:
            self._sinks.append(follower)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, "no thread can be started; see `ulimit -u`") from error
            self._thread = thread

    def end_generation(self, linger_s: float = LINGER_S) -> None:
        """The ranks so far have ended: finish each sink after ``linger_s`` seconds, once it is quiet."""
        until = time.monotonic() + linger_s
        with self._lock:
            for followed in self._sinks:
                followed.until = until if followed.until is None else min(until, followed.until)

    def close(self, patience_s: float) -> bool:
        """Copy the rest, until there is no progress for ``patience_s`` seconds; False if some is left then."""
        self.end_generation(0.0)
        self._wake.set()
        began = self._moved = time.monotonic()
        while self._sinks:
            now = time.monotonic()
            if now - self._moved > patience_s or now - began > CLOSE_S:
                return False
            time.sleep(INTERVAL_S / 10)
        return True

    def _pull(self, follower: _Sink) -> bool:
        new = False
        while follower.pull():
            new, self._moved = True, time.monotonic()
            if not follower.mid_line:
                break
        return new

    def _run(self) -> None:
        while True:
            with self._lock:
                followed = list(self._sinks)
            busy = False
            for each in followed:
                over = each.until is not None and time.monotonic() >= each.until
                if self._pull(each):
                    busy = True
                elif over:
                    each.finish()
                    with self._lock:
                        self._sinks.remove(each)
            if not busy:
                self._wake.wait(INTERVAL_S)
                self._wake.clear()


class _ToFiles(_Sink):
    """Copies a rank's output to its log, which has both streams, and to a separate file per stream if wanted."""

    def __init__(self, output: RankOutput, log: LogFile, own: Mapping[int, LogFile]) -> None:
        self._output = output
        self._log = log
        self._own = own
        self._files = (log, *own.values())
        self._mixer = Mixer()
        self._streams = {STDOUT: Stream(), STDERR: Stream()}
        self._fed = {STDOUT: 0.0, STDERR: 0.0}
        self._made = False

    def pull(self) -> bool:
        if not self._made:
            for file in self._files:
                file.write(b"")
            self._made = True
        busy = False
        for number, data, lost in self._output.new():
            stream, note = self._streams[number], missing(lost) if lost else b""
            if note or data:
                busy, self._fed[number] = True, time.monotonic()
                self._log.write(note + self._mixer.feed(stream, data))
                if number in self._own:
                    self._own[number].write(note + data)
            elif stream.pending and time.monotonic() - self._fed[number] > QUIET_S:
                self._log.write(self._mixer.quiet(stream))
        return busy

    def finish(self) -> None:
        for stream in self._streams.values():
            self._log.write(self._mixer.quiet(stream))
        for file in self._files:
            file.close()
        self._output.close()


@dataclass(slots=True)
class _Screen:
    """A descriptor of the console; two with the same target share a mixer."""

    descriptor: int
    mixer: Mixer
    gone: bool = False

    def write(self, data: bytes) -> None:
        if self.gone or not data:
            return
        try:
            write_all(self.descriptor, data)
        except OSError as error:
            self.gone = True
            print_message(f"output is no longer shown here ({error.strerror}), see the logs")


@dataclass(eq=False)
class _ToScreen(_Sink):
    """Copies one stream to the console."""

    reader: Reader
    screen: _Screen
    stream: Stream
    fed: float = 0.0
    in_a_row: int = 0

    def pull(self) -> bool:
        mixer, data = self.screen.mixer, self.reader.read(_CHUNK)
        if lost := self.reader.take_lost():
            self.screen.write(missing(lost))
        if data:
            self.fed = time.monotonic()
            self.screen.write(mixer.feed(self.stream, data))
            self.in_a_row = self.in_a_row + len(data) if mixer.amid_line(self.stream) else 0
        elif self.stream.pending and time.monotonic() - self.fed > QUIET_S:
            self.screen.write(mixer.quiet(self.stream))
        return bool(data)

    @property
    def mid_line(self) -> bool:
        return 0 < self.in_a_row < _IN_ONE_GO

    def finish(self) -> None:
        self.screen.write(self.screen.mixer.quiet(self.stream))
        self.reader.close()


@dataclass(slots=True)
class Console:
    """Copies rank output to ``stdout`` and ``stderr``, and to logs of ``log_bytes`` bytes per file, 0 for no limit."""

    stdout: int = STDOUT
    stderr: int = STDERR
    log_bytes: int = LOG_BYTES
    _screens: dict[int, _Screen] = field(init=False)
    _outputs: list[RankOutput] = field(default_factory=list)
    _to_screen: _SinkThread = field(default_factory=lambda: _SinkThread("console"))
    _to_files: _SinkThread = field(default_factory=lambda: _SinkThread("logs"))

    def __post_init__(self) -> None:
        mixer = Mixer()
        same = _same_place(self.stdout, self.stderr)
        self._screens = {
            STDOUT: _Screen(self.stdout, mixer),
            STDERR: _Screen(self.stderr, mixer if same else Mixer()),
        }

    def follow(self, output: RankOutput, log: Path, show: Mapping[int, Routing]) -> None:
        """Copy a rank's output to ``log``, and as ``show`` says for each stream."""
        self._outputs.append(output)
        for number, screen in self._screens.items():
            if show[number].shown:
                stream = Stream(show[number].prefix.encode())
                self._to_screen.follow(_ToScreen(output.reader(number), screen, stream))
        names = {STDOUT: "stdout", STDERR: "stderr"}
        own = {
            number: LogFile(log.with_suffix(f".{name}.log"), self.log_bytes)
            for number, name in names.items()
            if show[number].own_file
        }
        self._to_files.follow(_ToFiles(output, LogFile(log, self.log_bytes), own))

    def trim(self) -> None:
        """Limit the memory for output, even if all readers are blocked."""
        for output in self._outputs:
            output.trim()

    def end_generation(self) -> None:
        """The ranks so far have ended."""
        self._outputs.clear()
        self._to_screen.end_generation()
        self._to_files.end_generation()

    def close(self, patience_s: float = 5.0) -> None:
        """Copy the rest to files and console, as long as each makes progress every ``patience_s`` seconds."""
        if not self._to_files.close(patience_s):
            print_message("some output is missing in the logs: they could not be written in time")
        if not self._to_screen.close(patience_s):
            print_message("some output is not shown here: it was not read in time, see the logs")


def _same_place(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False
