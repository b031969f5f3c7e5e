"""Messages to people who are not at the terminal: how a run begins, each restart, no progress, the end.

Sent in a thread: a receiver that does not answer delays nothing and ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from opsd.launch.io.reporting import WorkQueue, print_message
from opsd.launch.io.run_log import names
from opsd.notify.receiver import NotifyError, Receiver, read_receivers
from opsd.words import duration, plural

Send = Callable[[str, Mapping[str, object]], None]

RESTART_S = 60.0
"""After this time a restart is reported alone. A restart that succeeds sooner is reported with its success."""
STUCK_S = 1800.0
"""Seconds without a step after which a run is stuck, unless ten of its usual steps are longer."""
LOOK_S = 5.0
LAST_S = 5.0
"""Seconds at the end for the last message."""
MAX_WAITING = 100


class Sender:
    """Sends to all receivers that ``where`` names; one that is slow delays no other. Each one's failure is said once.

    Files with URLs are read for each message, so that a renewed URL is used.
    """

    def __init__(self, where: Sequence[str], say: Callable[[str], None] = print_message) -> None:
        self._where = where
        self._say = say
        self._failed: set[str] = set()
        self._read = _queue()
        self._queues: dict[str, WorkQueue] = {}
        self.children: set[int] = set()
        """Processes that deliver a message."""

    def __call__(self, text: str, fields: Mapping[str, object]) -> None:
        """Send a message, after the earlier ones; never blocks."""
        if self._where:
            self._read.put(lambda: self._send(text, fields))

    def flush(self, timeout_s: float) -> None:
        """Wait for at most ``timeout_s`` seconds until all is sent."""
        deadline = time.monotonic() + timeout_s
        done = self._read.flush(timeout_s) and all(
            queue.flush(max(0.0, deadline - time.monotonic())) for queue in self._queues.values()
        )
        if not done:
            self._say(f"the last notification was not sent within {timeout_s:g} s")

    def _send(self, text: str, fields: Mapping[str, object]) -> None:
        for where in self._where:
            try:
                receivers = read_receivers(where)
            except NotifyError as error:
                self._note_failure(where, str(error))
                continue
            for receiver in receivers:
                queue = self._queues.setdefault(receiver.url, _queue())
                queue.put(partial(self._deliver, receiver, text, fields))

    def _deliver(self, receiver: Receiver, text: str, fields: Mapping[str, object]) -> None:
        try:
            receiver.send(text, fields, self.children)
        except NotifyError as error:
            self._note_failure(receiver.url, f"{receiver.name}: {error}")

    def _note_failure(self, key: str, why: str) -> None:
        if key not in self._failed:
            self._failed.add(key)
            self._say(f"not notified: {why}; its later failures are not mentioned")


def _queue() -> WorkQueue:
    return WorkQueue("notifications", limit=MAX_WAITING, awaited=False)


class Notices:
    """Tells people about the run ``run``. The launcher that leads calls it, and ``look`` once in a while."""

    def __init__(self, run: str, job: str, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._common = {"run": run, "job": job}
        self._run = run
        self._send = send
        self._clock = clock
        self.lead(lambda: None)

    def lead(self, furthest: Callable[[], int | None]) -> None:
        """This launcher begins to lead. ``furthest`` is the last step that was completed, None without any."""
        self._furthest = furthest
        self._why = ""
        self._since = self._moved = self._clock()
        self._told = self._stuck = False
        self._step: int | None = None
        self._step_s = self._repeated_s = 0.0

    def began(self, event: Mapping[str, Any]) -> None:
        """The first generation of this start of the run."""
        self._tell(
            "started", f"started: {plural(int(event.get('world_size') or 0), 'rank')} on {names(event['nodes'])}"
        )

    def interrupted(self, why: str) -> None:
        """The run makes no progress because of ``why``; all ranks are restarted."""
        if not self._why:
            self._since, self._told = self._clock(), False
        self._why = why

    def ranks_started(self) -> None:
        """The ranks of another generation run. Of a program without steps nothing else will be known."""
        if self._furthest() is None:
            self.resumed("the ranks run again", 0)

    def resumed(self, how: str, repeated: int) -> None:
        """The run goes on after an interruption, and does ``repeated`` steps again."""
        if self._why:
            self._tell("restarted", f"restarted: {self._why}; {how}", reason=self._why)
        self._why, self._stuck, self._moved = "", False, self._clock()
        self._repeated_s = repeated * self._step_s

    def look(self) -> None:
        """Compare with the last look."""
        now, furthest = self._clock(), self._furthest()
        if furthest is not None and furthest != self._step:
            self._note_step(furthest, now)
        if self._why and not self._told and now - self._since >= RESTART_S:
            self._told = True
            self._tell("restarting", f"is being restarted: {self._why}", reason=self._why)
        limit_s = max(STUCK_S, 10 * self._step_s) + self._repeated_s
        if not self._stuck and self._step is not None and now - self._moved >= limit_s:
            self._stuck = True
            why = f"; {self._why}" if self._why else ""
            said = f"is stuck: no step for {duration(now - self._moved)}; the last one is step {self._step}{why}"
            self._tell("stuck", said, reason=self._why)

    def _note_step(self, step: int, now: float) -> None:
        if self._step is not None and step > self._step:
            self._step_s = (now - self._moved) / (step - self._step)
        if self._stuck:
            self._tell("resumed", f"makes progress again, with step {step}")
        self._step, self._moved, self._stuck, self._repeated_s = step, now, False, 0.0

    def finished(self, code: int, reason: str, summary: str, report: Path | None) -> None:
        """The run has ended with ``code``; ``summary`` says how, what was done, and what it cost."""
        place = f"; report: {report}" if report is not None else ""
        self._tell("finished", f"{summary}{place}", exit_code=code, reason=reason, report=str(report or ""))

    def _tell(self, event: str, text: str, **fields: object) -> None:
        furthest = self._furthest()
        step = {} if furthest is None else {"step": furthest}
        self._send(f"{self._run} {text}", {"event": event, **self._common, **step, **fields})
