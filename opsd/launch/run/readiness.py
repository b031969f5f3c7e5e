"""Whether this node may replace another: reported to the leader while it is a spare."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from opsd.launch.claims.group import Group
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import print_message
from opsd.launch.run import messages
from opsd.launch.run.messages import CODEC
from opsd.slurm import node_comment
from opsd.slurm.allocation import in_job
from opsd.slurm.candidates import lemons_of
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.connect import choose
from opsd.slurm.leaf_paths import with_bad
from opsd.slurm.port import Slurm, SlurmError
from opsd.slurm.topology import Topology

ANSWER_S = 60.0
"""How long a node that has been given a slot may take to determine whether it may use it."""

START_ANSWER_S = 3.0
"""What the start of a run waits for each answer about nodes; a controller that is away takes longer to be noticed."""


class Readiness:
    """``ask`` returns why the node must not be used, "" if it may; it may block. ``refused`` gets each refusal.

    ``lemon`` returns whether others are to be preferred; it may block, and is asked once.

    The last answer holds while ``ask`` raises OSError, so that a controller that is down makes no spare unready. A node
    without any answer yet is not used.
    """

    def __init__(
        self,
        loop: Loop,
        group: Group,
        ask: Callable[[], str],
        refused: Callable[[str], None],
        lemon: Callable[[], bool] | None = None,
    ) -> None:
        self._loop = loop
        self._group = group
        self._ask = ask
        self._refused = refused
        self._asking = False
        self._known: str | None = None
        self._ask_lemon = lemon
        self._lemon = False
        self._then: Callable[[], None] | None = None

    def tell(self) -> None:
        """Report the readiness to the leader."""
        if not self._asking:
            self._asking = True
            self._loop.run_in_thread(self._ask, self._answered)
        if self._ask_lemon is not None:
            ask, self._ask_lemon = self._ask_lemon, None
            self._loop.run_in_thread(ask, self._judged)

    def before(self, take_part: Callable[[], None]) -> None:
        """Call ``take_part`` if the node was ready when last asked; if not, tell the leader, which then needs another.

        A swap does not wait for a file system or a controller, except on a node that has just joined.
        """
        if self._known is None:
            self._then = take_part
            self._loop.later(ANSWER_S, lambda: self._give_up(take_part))
            self.tell()
        elif self._known:
            self._tell_leader(self._known)
        else:
            take_part()

    def _answered(self, why: str | OSError) -> None:
        self._asking = False
        if isinstance(why, OSError) and self._known is not None:
            return
        text, before = str(why), self._known
        self._known = None if isinstance(why, OSError) else text
        self._tell_leader(text)
        if text and text != before:
            print_message(f"this node is not used as a spare: {text}")
            self._refused(text)
        then, self._then = self._then, None
        if then is not None and not text:
            then()

    def _judged(self, lemon: bool | OSError) -> None:
        self._lemon = lemon is True
        if self._lemon and self._known is not None:
            self._tell_leader(self._known)

    def _give_up(self, take_part: Callable[[], None]) -> None:
        """A file server that hangs must not hold up the run, also if this node leads."""
        if self._then is take_part:
            self._then = None
            self._tell_leader(f"whether it is ready could not be found out within {ANSWER_S:g} s")

    def _tell_leader(self, why: str) -> None:
        self._group.tell_leader(CODEC.encode(messages.Readiness(why, self._lemon)))


def spare_readiness(environ: Mapping[str, str] = os.environ) -> str:
    """Which requirements of this node's settings for spares it does not meet; see ``opsd.spares.pool``.

    Unreadable settings are a reason too. Without a configuration file there are no requirements. Raises OSError if it
    cannot be determined at the moment.
    """
    from opsd.config import (  # 0.2 s, which a launcher need not spend before it starts ranks
        ConfigError,
        find_file,
        load,
    )
    from opsd.spares.pool import why_not

    if find_file(env=environ) is None:
        return ""
    try:
        return why_not(load(env=environ), lambda: choose().slurm)
    except ConfigError as error:
        return str(error)


def given_back_at(environ: Mapping[str, str] = os.environ, connect: Callable[[], Slurm] | None = None) -> float | None:
    """When opsd gave this node back to Slurm's service, epoch seconds; None if never, or if that cannot be known."""
    node = environ.get("SLURMD_NODENAME")
    if not node:
        return None
    try:
        slurm = connect() if connect is not None else choose().slurm
        return node_comment.read(slurm.comments([node]).get(node, "")).back_at
    except SlurmError:
        return None


def known_at_start(
    topology: Topology,
    environ: Mapping[str, str] = os.environ,
    connect: Callable[[], Slurm] = lambda: CommandSlurm(deadline_s=START_ANSWER_S),
    wall: Callable[[], float] = time.time,
) -> tuple[frozenset[str], Topology]:
    """The cluster's nodes that keep failing, and ``topology`` with the ways that were bad when last measured.

    None of both where that cannot be known, as a start does not wait for it.
    """
    if not in_job(environ):
        return frozenset(), topology
    try:
        slurm = connect()
        comments = slurm.comments()
        return frozenset(lemons_of(slurm.nodes(), comments, wall())), with_bad(topology, comments, wall())
    except SlurmError:
        return frozenset(), topology


def is_lemon(
    environ: Mapping[str, str] = os.environ,
    connect: Callable[[], Slurm] | None = None,
    wall: Callable[[], float] = time.time,
) -> bool:
    """Whether the cluster's history shows that this node keeps failing; False where that cannot be known."""
    node = environ.get("SLURMD_NODENAME")
    if not node:
        return False
    from opsd.slurm.job_faults import NodeFaults  # loads pydantic, which launchers start without

    try:
        slurm = connect() if connect is not None else choose().slurm
        return NodeFaults(slurm, node, wall=wall).refresh().lemon
    except SlurmError:
        return False
