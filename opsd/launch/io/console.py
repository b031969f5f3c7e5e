"""What the ranks print: to the console, and to their log files.

Ranks write into memory (``Spool``); one thread brings it to the console and another to the files, so that a reader that
stands still, a full disk or a file server that hangs holds up neither the ranks nor the launcher.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opsd.launch.io.drain import Drain
from opsd.launch.io.log_file import LogFile, missing
from opsd.launch.io.mixer import Mixer, Stream
from opsd.launch.io.reporting import say, write_all
from opsd.launch.io.spool import Reader, Spool

STDOUT, STDERR = 1, 2
LOG_BYTES = 64 << 20
_CHUNK = 1 << 18
_IN_ONE_GO = 64 << 20
"""Bytes of one long line for which other streams wait."""
_TAIL_BYTES = 8192
QUIET_S = 0.1
"""A line that is not complete is shown when nothing more of it has come for so long."""


@dataclass(frozen=True, slots=True)
class Show:
    """What is done with a stream of a rank: ``shown`` on the console after ``prefix``, ``own_file`` besides the log."""

    shown: bool = True
    prefix: str = ""
    own_file: bool = False


class RankOutput:
    """What one rank prints. ``descriptors`` are its stdout and stderr, to be closed once it has them."""

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
        """The last ``lines`` lines, also of what has reached no file yet."""
        with self._lock:
            text = self._recent + b"".join(reader.peek(_TAIL_BYTES) for reader in self._readers.values())
        return "\n".join(text[-_TAIL_BYTES:].decode(errors="replace").splitlines()[-lines:])

    def reader(self, stream: int) -> Reader:
        """Somebody else who reads a stream, from its beginning."""
        return self._spools[stream].reader()

    def new(self) -> list[tuple[int, bytes, int]]:
        """What has come on each stream since the last call, with how many bytes are missing before it."""
        with self._lock:
            found = [(stream, reader.read(_CHUNK), reader.take_lost()) for stream, reader in self._readers.items()]
            for _, data, _ in found:
                self._recent = (self._recent + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        return found

    def trim(self) -> None:
        """Hold no more than is allowed, however late the readers are."""
        for spool in self._spools.values():
            spool.trim()

    def close(self) -> None:
        """Read no more for the files."""
        for reader in self._readers.values():
            reader.close()


class _ToFiles:
    """Follows a rank into its log, where both streams are, and into a file of its own for each that wants one."""

    def __init__(self, output: RankOutput, log: LogFile, own: Mapping[int, LogFile]) -> None:
        self._output = output
        self._log = log
        self._own = own
        self._mixer = Mixer()
        self._streams = {STDOUT: Stream(), STDERR: Stream()}
        self._fed = {STDOUT: 0.0, STDERR: 0.0}
        self._made = False

    def pull(self) -> bool:
        if not self._made:
            self._write_to_all(b"")
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

    def insists(self) -> bool:
        return False

    def _write_to_all(self, data: bytes) -> None:
        for file in (self._log, *self._own.values()):
            file.write(data)

    def finish(self) -> None:
        for stream in self._streams.values():
            self._log.write(self._mixer.quiet(stream))
        for file in (self._log, *self._own.values()):
            file.close()
        self._output.close()


@dataclass(slots=True)
class _Screen:
    """A descriptor of the console; two that lead to the same place share a mixer."""

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
            say(f"output is no longer shown here ({error.strerror}), see the logs")


@dataclass(slots=True)
class _ToScreen:
    """Follows one stream to the console."""

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

    def insists(self) -> bool:
        return 0 < self.in_a_row < _IN_ONE_GO

    def finish(self) -> None:
        self.screen.write(self.screen.mixer.quiet(self.stream))
        self.reader.close()


@dataclass(slots=True)
class Console:
    """Copies what ranks print to ``stdout`` and ``stderr``, and to logs of ``log_bytes`` bytes a file, 0 for any."""

    stdout: int = STDOUT
    stderr: int = STDERR
    log_bytes: int = LOG_BYTES
    _screens: dict[int, _Screen] = field(init=False)
    _outputs: list[RankOutput] = field(default_factory=list)
    _to_screen: Drain = field(default_factory=lambda: Drain("console"))
    _to_files: Drain = field(default_factory=lambda: Drain("logs"))

    def __post_init__(self) -> None:
        mixer = Mixer()
        same = _same_place(self.stdout, self.stderr)
        self._screens = {
            STDOUT: _Screen(self.stdout, mixer),
            STDERR: _Screen(self.stderr, mixer if same else Mixer()),
        }

    def follow(self, output: RankOutput, log: Path, show: Mapping[int, Show]) -> None:
        """Copy what a rank prints into ``log``, and to where ``show`` says for each stream."""
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
        """Hold no more output in memory than is allowed, also when all readers stand still."""
        for output in self._outputs:
            output.trim()

    def end_generation(self) -> None:
        """The ranks followed so far have ended."""
        self._outputs.clear()
        self._to_screen.end_generation()
        self._to_files.end_generation()

    def close(self, patience_s: float = 5.0) -> None:
        """Copy what is left, to files and console as long as they take something every ``patience_s`` seconds."""
        if not self._to_files.close(patience_s):
            say("some output is missing in the logs: they could not be written in time")
        if not self._to_screen.close(patience_s):
            say("some output is not shown here: it was not read in time, see the logs")


def _same_place(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False
