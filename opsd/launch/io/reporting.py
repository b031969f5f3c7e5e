"""Messages for the user on stderr, and events, one JSON object per line, in one or more files.

Everything is written in threads: a blocked reader or a file system that hangs holds up nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from opsd import durable

Work = Callable[[], None]
Tone = Literal["", "title", "good", "bad"]
LIMIT = 4096
FLUSH_S = 1.0
"""Time at the exit for a blocked reader of stderr."""
_STDERR = 2
_COLORS = {"": "", "title": "\x1b[1m", "good": "\x1b[1;32m", "bad": "\x1b[1;31m"}
_all: weakref.WeakSet[WorkQueue] = weakref.WeakSet()


class WorkQueue:
    """Runs the callables that are ``put``, in order. Entries that do not fit into the queue are dropped and counted.

    ``missed`` is called in the thread with the number of dropped items, once the work continues. The thread is a
    daemon: a file system that hangs must not keep the launcher from exiting. Work handles its own errors.
    ``flush_all`` waits for those that are ``awaited``.
    """

    def __init__(
        self, name: str, *, limit: int = LIMIT, missed: Callable[[int], None] | None = None, awaited: bool = True
    ) -> None:
        self.name = name
        self._limit = limit
        self._tell_missed = missed
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._missed = 0
        self._thread: threading.Thread | None = None
        if awaited:
            _all.add(self)

    def put(self, work: Work) -> None:
        """Run ``work`` after what was put before; never blocks."""
        with self._lock:
            if self._queue.qsize() >= self._limit or not self._served():
                self._missed += 1
            else:
                self._queue.put(work)

    def flush(self, timeout_s: float) -> bool:
        """Wait for at most ``timeout_s`` seconds until all work is done; False if some is left."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(timeout_s)

    def _served(self) -> bool:
        """Whether there is a thread; the limit of processes may prevent it for now."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _run(self) -> None:
        while True:
            self._queue.get()()
            with self._lock:
                missed, self._missed = self._missed, 0
            if missed and self._tell_missed is not None:
                self._tell_missed(missed)


def flush_all(timeout_s: float) -> list[str]:
    """Wait for at most ``timeout_s`` seconds until all awaited queues are empty; returns the names of the others."""
    deadline = time.monotonic() + timeout_s
    late = [work.name for work in list(_all) if not work.flush(max(0.0, deadline - time.monotonic()))]
    return sorted(late)


def print_message(text: str, *, tone: Tone = "") -> None:
    """Print one line or paragraph on stderr. Never blocks: a reader that does not read must not hold up the run.

    On a terminal the first line is coloured by its ``tone``.
    """
    _messages.put(lambda: print_now(text, tone))


def flush(timeout_s: float = FLUSH_S) -> None:
    """Wait for at most ``timeout_s`` seconds until all messages are printed."""
    _messages.flush(timeout_s)


def write_all(descriptor: int, data: bytes | bytearray) -> None:
    """Write all of ``data``, waiting if the descriptor is non-blocking. Raises OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll()


def print_now(text: str, tone: Tone = "") -> None:
    """The same at once. What cannot be written is lost: a full disk must not end what the text tells of."""
    with contextlib.suppress(OSError):
        first, newline, rest = text.partition("\n")
        if tone and takes_color(_STDERR):
            first = f"{_COLORS[tone]}{first}\x1b[0m"
        write_all(_STDERR, f"opsd: {first}{newline}{rest}\n".encode(errors="replace"))


def takes_color(descriptor: int) -> bool:
    """Whether it is a terminal whose user has not refused colours."""
    return os.isatty(descriptor) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _missed(count: int) -> None:
    print_now(f"{count} messages are not shown here: nobody read them in time")


_messages = WorkQueue("messages", missed=_missed)
atexit.register(flush)


class EventFile:
    """One file of events. A failure to write is reported once and does not stop the run.

    A full disk may take a part of a line; the next event then begins on a new line. If another program replaces or
    removes the file, the next event goes to the one that has its name then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._failed = False
        self._torn = False

    def open(self) -> None:
        """Create the file if it does not exist. Raises OSError."""
        if self._file is not None and not durable.is_named(self.path, self._file.fileno()):
            self._file.close()
            self._file = None
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # for as long as the launcher lives

    def append(self, line: bytes) -> None:
        """Write one encoded event durably; blocks as long as the file system does."""
        whole = b"\n" + line if self._torn else line
        try:
            self.open()
            assert self._file is not None
            self._torn = self._file.write(whole) != len(whole)
            durable.sync(self._file)
        except OSError as error:
            if not self._failed:
                self._failed = True
                print_message(f"events are not written to {self.path}: {error.strerror}")

    def missed(self, count: int) -> None:
        """Report that ``count`` events were dropped."""
        print_message(f"{count} events are missing in {self.path}: it did not take them in time")


def encoded(record: Mapping[str, object]) -> bytes:
    """An event as a line of a file."""
    return (json.dumps(record, default=str) + "\n").encode()


class EventLog:
    """Writes events to several files, each in its own thread: a file system that hangs holds up nothing.

    Raises OSError if a file cannot be created. ``relay`` is called with every event as well.
    """

    def __init__(self, run: str, node: str, targets: Sequence[Path]) -> None:
        self._common = {"run": run, "node": node}
        self._files: list[tuple[EventFile, WorkQueue]] = []
        for path in targets:
            file = EventFile(path)
            file.open()
            self._files.append((file, WorkQueue(f"events for {path}", missed=file.missed)))
        self.generation = 0
        self.relay: Callable[[dict[str, object]], None] | None = None

    def emit(self, event: str, **fields: object) -> None:
        """Append an event of the current generation with the current time."""
        self.write(event, None, fields)

    def write(self, event: str, t: float | None, fields: Mapping[str, object], *, relayed: bool = True) -> None:
        """Append an event of the current generation; ``t`` in wall seconds, None for now."""
        own = {"t": time.time() if t is None else t, "event": event, "generation": self.generation}
        record = {**own, **self._common, **fields}
        line = encoded(record)
        for file, work in self._files:
            work.put(lambda file=file: file.append(line))  # type: ignore[misc]
        if relayed and self.relay is not None:
            self.relay(record)

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until the files have all events, for at most ``timeout_s`` seconds each."""
        for _, work in self._files:
            work.flush(timeout_s)
