"""The state of a job on its other nodes: their agents are asked when the job's page is requested.

The list of nodes comes from Slurm, never from a run's files, which a user writes. Requests do not wait: they get the
last known answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from opsd.collectors.slurm import SlurmSettings
from opsd.config import Settings
from opsd.slurm.port import SlurmError

FRESH_S: Final = 5.0
TIMEOUT_S: Final = 2.0
MAX_NODES: Final = 128
AT_ONCE: Final = 16
MAX_ANSWER: Final = 64 << 10
"""Limit of one agent's answer in bytes."""
KEPT: Final = 16
"""Jobs whose nodes are remembered."""


class PeerError(Exception):
    """Invalid settings for asking other agents; the message is one sentence."""


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


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of the agent of ``node``, or the problem. Its pages are at ``url``."""

    node: str
    url: str
    summary: NodeOfJob | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """The other nodes of a job; ``note`` is a remark about all of them."""

    answers: tuple[Answer, ...] = ()
    note: str = ""


class JobNodes:
    """The other nodes of jobs, with their last answers. Thread-safe.

    ``nodes_of`` names the nodes of a job and may raise SlurmError; ``ask`` asks the agent of a node and never raises.
    """

    def __init__(
        self,
        node: str,
        nodes_of: Callable[[str], Sequence[str]],
        ask: Callable[[str, str], Answer],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._nodes_of, self._ask, self._clock = node, nodes_of, ask, clock
        self._known: dict[str, tuple[OtherNodes, float]] = {}
        self._busy: set[str] = set()
        self._guard = threading.Lock()

    def of(self, job: str) -> OtherNodes:
        """The other nodes of ``job``, at most some seconds old; the first call says that they are being asked."""
        if not job.isascii() or not job.isdigit():
            return OtherNodes(note="A run without a job in Slurm: only this node is known.")
        with self._guard:
            others, stale_at = self._known.get(job, (OtherNodes(note="The other nodes are being asked."), 0.0))
            if self._clock() >= stale_at and job not in self._busy:
                self._busy.add(job)
                threading.Thread(target=self._renew, args=(job,), name="job-nodes", daemon=True).start()
        return others

    def _renew(self, job: str) -> None:
        others = OtherNodes(note="The other nodes could not be asked: a bug in opsd.")
        try:
            others = self._ask_all(job)
        except SlurmError as error:
            others = OtherNodes(note=f"Which other nodes the job has is not known: {error}")
        finally:
            self._remember(job, others)

    def _remember(self, job: str, others: OtherNodes) -> None:
        with self._guard:
            self._busy.discard(job)
            self._known.pop(job, None)
            self._known[job] = others, self._clock() + FRESH_S
            while len(self._known) > KEPT:
                del self._known[next(iter(self._known))]

    def _ask_all(self, job: str) -> OtherNodes:
        nodes = [node for node in self._nodes_of(job) if node != self._node]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(AT_ONCE, "job-nodes") as threads:
            answers = tuple(threads.map(lambda node: self._ask(node, job), nodes[:MAX_NODES]))
        return OtherNodes(answers, f"{len(nodes) - MAX_NODES} more are not asked." if len(nodes) > MAX_NODES else "")


def job_nodes(settings: Settings) -> JobNodes | None:
    """For an agent with these settings; None without Slurm or on a loopback address, as it has no peers then.

    Raises PeerError.
    """
    from opsd.agent.web.asker import Asker  # megabytes that an agent without peers does not need
    from opsd.slurm.connect import choose

    if not settings.section(SlurmSettings).enabled or _is_loopback(settings.agent.listen):
        return None
    slurm = cache(lambda: choose().slurm)

    def nodes_of(job: str) -> Sequence[str]:
        return next((found.nodes for found in slurm().jobs([int(job)])), ())

    return JobNodes(settings.agent.node, nodes_of, Asker(settings.agent))


def _is_loopback(listen: str) -> bool:
    host = listen.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")
