"""How a launcher with fellows ends: at once, or as the head, once the others and the job know."""

from __future__ import annotations

import time
from typing import Protocol

from opsd.launch.claims.port import Group
from opsd.launch.io.aside import aside
from opsd.launch.run.supervisor import Supervisor

FAREWELL_S = 1.0
"""How long the head stays for the others after the end."""


class Job(Protocol):
    """The job that the run is part of, as far as its end goes. May block; is called in a thread."""

    def end(self, code: int, lost: tuple[str, ...], unfit: tuple[str, ...]) -> None:
        """The run has ended with the exit code ``code``, without the nodes ``lost``; ``unfit`` ones are to be avoided.

        May not return, because it ends the job.
        """
        ...


class Farewell:
    """The end of this launcher."""

    def __init__(self, node: Supervisor, group: Group, job: Job) -> None:
        self._node = node
        self._group = group
        self._job = job
        self._ended: tuple[int, str] | None = None
        self._bad: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._last_word: tuple[int, str] | None = None

    def over(self, code: int, reason: str, lost: tuple[str, ...], unfit: tuple[str, ...]) -> None:
        """As the head, this launcher ends the run: it sees to what has to be done once that has come about."""
        self._ended, self._bad = (code, reason), (lost, unfit)

    def leave(self, code: int, reason: str) -> None:
        """Exit; the head after the others, so that they hear of the end, and once the job knows.

        Not for another end than this launcher has made: the run may have gone on under another head.
        """
        if self._ended != (code, reason):
            self._node.finish(code, reason)
        elif self._last_word is None:
            self._last_word = (code, reason)
            self._wait_for_others(time.monotonic() + FAREWELL_S)

    def _wait_for_others(self, limit: float) -> None:
        if len(self._group.alive) <= 1 or time.monotonic() > limit:
            self._tell_job()
        else:
            self._node.loop.later(0.05, lambda: self._wait_for_others(limit))

    def _tell_job(self) -> None:
        assert self._last_word is not None
        (lost, unfit), (code, reason) = self._bad, self._last_word
        aside(self._node.loop, lambda: self._job.end(code, lost, unfit), lambda _: self._node.finish(code, reason))

    def hasten(self) -> None:
        """Exit now if the end has come: Slurm ends the job, as this launcher has asked it to."""
        if self._last_word is not None:
            self._node.finish(*self._last_word)
