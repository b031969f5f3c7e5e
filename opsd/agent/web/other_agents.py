"""Asking the agents of other nodes when a page is requested.

The list of nodes comes from Slurm, never from a run's files, which a user writes. Requests do not wait: they get the
last known answers. ``JobNodes`` has what they say of one job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from opsd.slurm.port import SlurmError
from opsd.threads import start_thread

S = TypeVar("S")

FRESH_S: Final = 5.0
TIMEOUT_S: Final = 2.0
MAX_NODES: Final = 128
AT_ONCE: Final = 16
MAX_ANSWER: Final = 64 << 10
"""Limit of one agent's answer in bytes."""
KEPT: Final = 16
"""Questions whose answers are remembered."""


class PeerError(Exception):
    """Invalid settings for asking other agents; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[S]):
    """The answer of the agent of ``node``, or the problem. Its pages are at ``url``."""

    node: str
    url: str
    summary: S | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class OtherNodes(Generic[S]):
    """The answers of other nodes; ``note`` is a remark about all of them."""

    answers: tuple[Answer[S], ...] = ()
    note: str = ""


class OtherAgents(Generic[S]):
    """Other nodes' agents, with their last answers to each question. Thread-safe.

    ``nodes_of`` names the nodes to ask a question and may raise SlurmError; ``ask`` asks the agent of a node and never
    raises. Answers are asked for again after ``fresh_s``; at most ``most`` nodes are asked.
    """

    def __init__(
        self,
        node: str,
        nodes_of: Callable[[str], Sequence[str]],
        ask: Callable[[str, str], Answer[S]],
        *,
        clock: Callable[[], float] = time.monotonic,
        fresh_s: float = FRESH_S,
        most: int = MAX_NODES,
    ) -> None:
        self._node, self._nodes_of, self._ask, self._clock = node, nodes_of, ask, clock
        self._fresh_s, self._most = fresh_s, most
        self._known: dict[str, tuple[OtherNodes[S], float]] = {}
        self._busy: set[str] = set()
        self._guard = threading.Lock()

    def of(self, question: str) -> OtherNodes[S]:
        """The last answers; the first call says that the nodes are being asked."""
        with self._guard:
            others, stale_at = self._known.get(question, (OtherNodes(note="The other nodes are being asked."), 0.0))
            ask = self._clock() >= stale_at and question not in self._busy
            if ask and start_thread("other-agents", partial(self._renew, question)):
                self._busy.add(question)
        return others

    def _renew(self, question: str) -> None:
        others: OtherNodes[S] = OtherNodes(note="The other nodes could not be asked: a bug in opsd.")
        try:
            others = self._ask_all(question)
        except SlurmError as error:
            others = OtherNodes(note=f"Which other nodes there are is not known: {error}")
        finally:
            self._remember(question, others)

    def _remember(self, question: str, others: OtherNodes[S]) -> None:
        with self._guard:
            self._busy.discard(question)
            self._known.pop(question, None)
            self._known[question] = others, self._clock() + self._fresh_s
            while len(self._known) > KEPT:
                del self._known[next(iter(self._known))]

    def _ask_all(self, question: str) -> OtherNodes[S]:
        nodes = [node for node in self._nodes_of(question) if node != self._node]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(AT_ONCE, "other-agents") as threads:
            answers = tuple(threads.map(lambda node: self._ask(node, question), nodes[: self._most]))
        left = len(nodes) - self._most
        return OtherNodes(answers, f"{left} more are not asked." if left > 0 else "")


class IncidentSummary(BaseModel):
    """An incident as ``/api/v1/jobs/ID`` lists it."""

    model_config = ConfigDict(frozen=True)

    severity: str = Field(max_length=32)
    summary: str = Field(max_length=4096)


class NodeOfJob(BaseModel):
    """What one node knows of a job: the answer of ``/api/v1/jobs/ID``.

    ``live`` of the ``ranks`` there have a process. ``step`` is the highest completed one, ``step_s`` the slowest rank's
    last in seconds, ``silent_s`` the longest time since a rank changed phase or step; None if no rank reports it.
    """

    model_config = ConfigDict(frozen=True)

    node: str = Field(max_length=256)
    state: str = Field(max_length=32)
    generation: int
    ranks: int
    live: int
    step: int | None = None
    step_s: float | None = None
    silent_s: float | None = None
    tokens_per_second: float | None = None
    incidents: tuple[IncidentSummary, ...] = ()


class JobNodes(OtherAgents[NodeOfJob]):
    """The other nodes of jobs; the question is the number of the job."""

    def of(self, question: str) -> OtherNodes[NodeOfJob]:
        """The other nodes of a job, at most some seconds old."""
        if not question.isascii() or not question.isdigit():
            return OtherNodes(note="A run without a job in Slurm: only this node is known.")
        return super().of(question)
