"""The launcher's event loop: file descriptors, timers and signals in one thread, blocking work in others."""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Protocol, TypeVar

T = TypeVar("T")
Callback = Callable[[], None]


class Timer:
    """A pending call, which ``cancel()`` prevents."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callback) -> None:
        self.due = due
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Cancel the call; harmless after it was made."""
        self.callback = None


class Timers(Protocol):
    """What decisions need of a loop: clock, timers, work beside them. ``opsd simulate`` has one with virtual time."""

    def time(self) -> float:
        """Monotonic seconds."""

    def later(self, delay_s: float, callback: Callback) -> Timer:
        """Call ``callback`` once, ``delay_s`` seconds from now."""

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T | OSError], None], *, key: str = "") -> bool:
        """See ``Loop.run_in_thread``."""


class Loop:
    """Calls back when a descriptor is ready, a timer is due, a signal has arrived or a thread requests it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._running = True
        self._handled: frozenset[signal.Signals] = frozenset()
        self.last_idle = time.monotonic()
        """Monotonic second at which the loop last waited: an event that it serves happened after it, or at it."""
        self._busy: set[str] = set()
        self._from_threads: deque[Callback] = deque()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self.watch(self._woken.fileno(), self._serve_threads)

    def watch(self, descriptor: int, callback: Callback, *, writable: bool = False) -> None:
        """Call ``callback`` whenever ``descriptor`` is readable (a pidfd: once its process has ended), or writable."""
        self._selector.register(descriptor, selectors.EVENT_WRITE if writable else selectors.EVENT_READ, callback)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching; the descriptor must still be open."""
        self._selector.unregister(descriptor)

    def time(self) -> float:
        return time.monotonic()

    def later(self, delay_s: float, callback: Callback) -> Timer:
        """Call ``callback`` once, ``delay_s`` seconds from now."""
        timer = Timer(time.monotonic() + delay_s, callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def call_soon_threadsafe(self, callback: Callback) -> None:
        """Call ``callback`` from the loop; callable from any thread, and needs no resource that could run out."""
        self._from_threads.append(callback)
        with suppress(BlockingIOError):  # enough has been sent to wake it
            self._wake.send(b"\0")

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T | OSError], None], *, key: str = "") -> bool:
        """Run ``work`` in a thread, then call ``done`` from the loop with its result or the OSError it raised.

        Any other exception is raised from the loop. The thread is a daemon: a file system that hangs must not keep the
        launcher from exiting.

        Work with a ``key`` runs once at a time: while some with the same key runs, nothing is done and False is
        returned.
        """
        if key:
            if key in self._busy:
                return False
            self._busy.add(key)

        def run() -> None:
            outcome: T | Exception
            try:
                outcome = work()
            except Exception as error:
                outcome = error
            self.call_soon_threadsafe(lambda: finish(outcome))

        def finish(outcome: T | Exception) -> None:
            self._busy.discard(key)
            if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
                raise outcome
            done(outcome)

        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError:
            why = "no thread can be started; the limit of processes (`ulimit -u`) is reached"
            no_thread = OSError(errno.EAGAIN, why)
            self.later(0.0, lambda: finish(no_thread))
        return True

    def _serve_threads(self) -> None:
        self._woken.recv(4096)
        for _ in range(len(self._from_threads)):
            self._from_threads.popleft()()

    def every(self, interval_s: float, callback: Callback) -> None:
        """Call ``callback`` periodically, ``interval_s`` seconds after the end of the previous call."""

        def tick() -> None:
            callback()
            self.later(interval_s, tick)

        self.later(interval_s, tick)

    def on_signals(self, numbers: Iterable[signal.Signals], callback: Callable[[signal.Signals], None]) -> None:
        """Deliver the given signals as calls from the loop. Only from the main thread, once per process."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handled = frozenset(numbers)

        def nothing(number: int, frame: FrameType | None) -> None:
            """Exist, so that the default action does not happen; the wake-up descriptor does the rest."""

        for number in handled:
            signal.signal(number, nothing)
        self._handled = handled

        def deliver() -> None:
            for number in os.read(reader, 64):
                if number in handled:
                    callback(signal.Signals(number))

        self.watch(reader, deliver)

    def ignore_signals(self) -> None:
        """From now on the signals do nothing, not even at the interpreter's own end: the exit code is decided."""
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)

    def run(self) -> None:
        """Run until ``stop()``, which may have been called before."""
        while self._running:
            before = time.monotonic()
            ready = self._selector.select(self._timeout(before))
            after = time.monotonic()
            if after - before > 0.001 or not ready:
                self.last_idle = after
            for key, _ in ready:
                # An earlier callback of this round may have closed the descriptor, and another taken its number.
                if self._selector.get_map().get(key.fileobj) is key:
                    key.data()
            self._run_timers()

    def stop(self) -> None:
        """Let ``run()`` return after the current callback."""
        self._running = False

    def _timeout(self, now: float) -> float | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - now) if self._timers else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._running and self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
