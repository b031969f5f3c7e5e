"""Keeps in the nodes' comments which jobs failed on them and ran elsewhere, so that all who score nodes count these.

Any agent may be the one that asks Slurm's accounting. Each looks at all comments every six hours, at a moment of its
own. It asks if no comment has a reading from that time. It first notes in its own node's comment that it asks.
So one agent of a cluster asks, and another one when that agent is gone, without an election. An agent that may not
write comments does not ask. Nor does one with ``policy.drain`` off, since drains are not recorded then either. If two
ask at once, both write the same.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from opsd.lemons import Fault
from opsd.slurm import job_faults, node_comment
from opsd.slurm.candidates import JOB, accounting, faults
from opsd.slurm.node_comment import Accounting
from opsd.slurm.port import SlurmNodes

PERIOD_S: Final = 6 * 3600.0
"""Seconds between two readings of the accounting, and between two looks of an agent at all comments."""
FIRST_S: Final = 3600.0
"""The first look of an agent comes within this time after its start, at a moment that its node's name decides."""
AGAIN_DAYS: Final = 7
"""What a later reading goes back: a job that waits longer for its next start is missed."""


class FailedJobs:
    """The part of the agent of ``node``, which asks and writes only while it ``may_ask``.

    ``read`` returns the faults of so many days before an epoch second.
    """

    may_ask = False

    def __init__(
        self,
        slurm: SlurmNodes,
        node: str,
        *,
        read: Callable[[float, float], list[Fault]] = lambda now, days: job_faults.read(now=now, days=days),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._slurm, self._node, self._read, self._clock, self._wall = slurm, node, read, clock, wall
        self._due = clock() + FIRST_S * (zlib.crc32(node.encode()) / 2**32)
        self._known: Accounting | None = None
        self._looked = False

    @property
    def counted(self) -> bool | None:
        """Whether the failures of jobs of the last hours are in the comments; None before the first look."""
        if not self._looked:
            return None
        return self._known is not None and self._known.answered and self._wall() - self._known.at < 2 * PERIOD_S

    def refresh(self) -> None:
        """Look at all comments if it is time, and ask if nobody has. Takes as long as Slurm does; raises SlurmError."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + PERIOD_S
        comments = self._slurm.comments()
        self._known, self._looked = accounting(comments), True
        if (
            self.may_ask
            and self._node in comments
            and (self._known is None or self._wall() - self._known.at >= PERIOD_S)
        ):
            self._ask(comments)

    def _ask(self, comments: Mapping[str, str]) -> None:
        at = self._wall()
        before = [one for text in comments.values() if (one := node_comment.read(text).accounting) and one.answered]
        days = job_faults.DAYS if not before else AGAIN_DAYS + (at - max(one.at for one in before)) / 86_400
        self._note(Accounting(at, answered=False))
        found = self._read(at, min(days, job_faults.DAYS))
        for name in {fault.node for fault in found} & comments.keys():
            self._blame(name, found, at)
        self._note(Accounting(at, answered=True))

    def _note(self, done: Accounting) -> None:
        comment = self._slurm.comments([self._node]).get(self._node, "")
        record = replace(node_comment.read(comment), accounting=done)
        self._slurm.set_comment(self._node, node_comment.write(comment, record))
        self._known = done

    def _blame(self, name: str, found: Iterable[Fault], at: float) -> None:
        """Keep the failures on a node that its stays do not explain, unless they are known."""
        comment = self._slurm.comments([name]).get(name, "")
        record = node_comment.read(comment)
        counted = faults({name: comment}, (fault for fault in found if fault.node == name))
        after = record.blamed((fault.at for fault in counted if fault.kind == JOB), at)
        if after != record:
            self._slurm.set_comment(name, node_comment.write(comment, after))
