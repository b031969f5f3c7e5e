"""The other nodes: what each agent says of its node and of a job, and what Slurm says of them.

The list of nodes comes from Slurm, never from a run's files, which a user writes. Requests do not wait: they get the
last known answers.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from opsd import __version__
from opsd.agent.loop import Snapshot
from opsd.agent.web.api import repair_now
from opsd.agent.web.html import TONES, run_state_text
from opsd.agent.web.incidents import Listing
from opsd.collectors.base import RunFact
from opsd.collectors.slurm import SlurmSettings
from opsd.config import Settings
from opsd.slurm.port import Node, Slurm, SlurmError
from opsd.threads import start_thread

if TYPE_CHECKING:
    from opsd.plan.forecast import Forecast


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


FLEET_FRESH_S: Final = 20.0
MAX_ASKED: Final = 512
MAX_RUNS: Final = 8
MAX_SAID: Final = 200
_GONE: Final = ("future", "unknown")


class RunSummary(BaseModel):
    """A run in the answer of ``/api/v1/node``."""

    model_config = ConfigDict(frozen=True)

    run: str = Field(max_length=256)
    job: str = Field(max_length=64)
    state: str = Field(max_length=32)
    outlook: str = Field(default="", max_length=160)
    """Days left and more, of a run with a plan on the node of its rank 0."""
    late: bool = False
    ablations: str = Field(default="", max_length=160)
    """What the studies beside it cost."""


class NodeSummary(BaseModel):
    """What an agent says of its node in brief: the answer of ``/api/v1/node``.

    ``incidents`` are the numbers of open ones by severity, symptoms left out. ``worst`` is the summary of the gravest,
    ``cost`` what that costs now, ``acts`` who acts, and ``worst_id`` its id.
    ``spare`` is None on a node that is no spare, else whether it is ready. ``repair`` is where its repair is, "" if
    there is none. ``age_s`` is the age of this answer.
    """

    model_config = ConfigDict(frozen=True)

    node: str = Field(max_length=256)
    version: str = Field(max_length=32)
    age_s: float
    gpus: int
    gpus_lost: int
    runs: tuple[RunSummary, ...] = ()
    incidents: Mapping[str, int] = {}
    worst: str = Field(default="", max_length=4096)
    worst_id: str = Field(default="", max_length=256)
    cost: str = Field(default="", max_length=MAX_SAID)
    acts: str = Field(default="", max_length=MAX_SAID)
    spare: bool | None = None
    repair: str = Field(default="", max_length=80)
    lemon: bool = False


def node_summary(
    snapshot: Snapshot,
    node: str,
    now: float,
    forecast_of: Callable[[RunFact], Forecast | None] = lambda _: None,
    studies_of: Callable[[RunFact], str] = lambda _: "",
) -> NodeSummary:
    """This node in brief at the monotonic second ``now``.

    ``forecast_of`` and ``studies_of`` are asked about runs whose rank 0 is here.
    """
    leading = {rank.run for rank in snapshot.ranks if rank.rank == 0}
    roots = [incident for incident in snapshot.incidents if incident.cause is None]
    severities = [*TONES]
    worst = min(roots, key=lambda incident: severities.index(incident.severity), default=None)
    told = Listing.of(snapshot, node).brief(worst) if worst else None
    ready, repair = snapshot.value("opsd_spare_ready"), repair_now(snapshot)
    return NodeSummary(
        node=node,
        version=__version__,
        age_s=max(0.0, now - snapshot.at),
        gpus=len(snapshot.gpus),
        gpus_lost=sum(gpu.lost is not None for gpu in snapshot.gpus),
        runs=tuple(
            _run_summary(run, *((forecast_of(run), studies_of(run)) if run.run in leading else (None, "")))
            for run in snapshot.runs[:MAX_RUNS]
        ),
        incidents=Counter(incident.severity.value for incident in roots),
        worst=worst.summary[:MAX_SAID] if worst else "",
        worst_id=worst.id[:256] if worst else "",
        cost=told.cost[:MAX_SAID] if told else "",
        acts=told.acts[:MAX_SAID] if told else "",
        spare=None if ready is None else bool(ready),
        repair=repair.text[:80] if repair else "",
        lemon=snapshot.value("opsd_node_lemon") == 1,
    )


def _run_summary(run: RunFact, found: Forecast | None, studies: str) -> RunSummary:
    said = RunSummary(run=run.run[:256], job=run.job[:64], state=run_state_text(run)[:32], ablations=studies[:160])
    if found is None:
        return said
    from opsd.plan.forecast import brief

    return said.model_copy(update={"outlook": brief(found)[:160], "late": bool(found.blame)})


@dataclass(frozen=True, slots=True)
class FleetView:
    """The other nodes: the answers of their agents, and all nodes as Slurm knows them, by name."""

    others: OtherNodes[NodeSummary]
    slurm: Mapping[str, Node]


class Fleet:
    """All other nodes of the cluster. Thread-safe. ``ask`` asks the agent of a node and never raises."""

    def __init__(
        self,
        node: str,
        slurm: Callable[[], Slurm],
        ask: Callable[[str, str], Answer[NodeSummary]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slurm = slurm
        self._nodes: Mapping[str, Node] = {}
        self._agents = OtherAgents(node, self._names, ask, clock=clock, fresh_s=FLEET_FRESH_S, most=MAX_ASKED)

    def view(self) -> FleetView:
        """The latest answers; the first call says that the nodes are being asked."""
        return FleetView(self._agents.of(""), self._nodes)

    def _names(self, _question: str) -> list[str]:
        self._nodes = {node.name: node for node in self._slurm().nodes() if node.state not in _GONE}
        return [*self._nodes]


class Peers(NamedTuple):
    """What asks the agents of other nodes."""

    jobs: JobNodes
    fleet: Fleet


def connect(settings: Settings) -> Peers | None:
    """For an agent with these settings; None without Slurm or on a loopback address, as it has no peers then.

    Raises PeerError.
    """
    from functools import cache

    from opsd.agent.web.asker import Asker  # megabytes that an agent without peers does not need
    from opsd.slurm.connect import choose

    if not settings.section(SlurmSettings).enabled or _is_loopback(settings.agent.listen):
        return None
    slurm = cache(lambda: choose().slurm)

    def nodes_of(job: str) -> tuple[str, ...]:
        return next((found.nodes for found in slurm().jobs([int(job)])), ())

    node, asker = settings.agent.node, Asker(settings.agent)
    return Peers(JobNodes(node, nodes_of, asker.job), Fleet(node, slurm, asker.node))


def _is_loopback(listen: str) -> bool:
    host = listen.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")
