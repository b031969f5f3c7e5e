"""The state of a job on its other nodes: their agents are asked when the job's page is requested.

The list of nodes comes from Slurm, never from a run's files, which a user writes. Requests do not wait: they get the
last known answers.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opsd.agent.web.access import has_tls
from opsd.collectors.slurm import SlurmSettings
from opsd.config import Settings
from opsd.files import read_settings
from opsd.settings.agent import AgentSettings
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
        with ThreadPoolExecutor(AT_ONCE, "job-nodes") as threads:
            answers = tuple(threads.map(lambda node: self._ask(node, job), nodes[:MAX_NODES]))
        return OtherNodes(answers, f"{len(nodes) - MAX_NODES} more are not asked." if len(nodes) > MAX_NODES else "")


class Asker:
    """Asks agents that are configured like this one: same port, TLS if this one has it, user and password from a file.

    Without TLS agents that want a password are not asked.

    Raises PeerError if the files that the settings name cannot be used.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._port = settings.listen.rpartition(":")[2]
        tls = settings.web_config is not None and has_tls(settings.web_config)
        self._scheme = "https" if tls else "http"
        self._context = _trusting(settings.peer_ca_file) if tls else None
        self._headers = _authorization(settings.peer_credentials_file) if settings.web_config else {}
        self._exposed = bool(self._headers) and not tls

    def __call__(self, node: str, job: str) -> Answer:
        """What the agent of ``node`` knows about ``job``."""
        url = f"{self._scheme}://{node}:{self._port}"
        if self._exposed:
            return Answer(node, url, problem="is not asked: without TLS the password would go in the clear")
        try:
            status, body = self._get(node, f"/api/v1/jobs/{job}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            return Answer(node, url, problem=f"does not answer: {error}")
        if status == http.client.NOT_FOUND:
            return Answer(node, url, problem="knows of no run of this job")
        try:
            return Answer(node, url, NodeOfJob.model_validate_json(body))
        except ValidationError:
            return Answer(node, url, problem=f"answers what is not understood ({status})")

    def _get(self, node: str, path: str) -> tuple[int, bytes]:
        host = f"{node}:{self._port}"
        connection = (
            http.client.HTTPConnection(host, timeout=TIMEOUT_S)
            if self._context is None
            else http.client.HTTPSConnection(host, timeout=TIMEOUT_S, context=self._context)
        )
        try:
            connection.request("GET", path, headers=self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER)
        finally:
            connection.close()


def _trusting(file: Path | None) -> ssl.SSLContext:
    try:
        if file is not None:
            read_settings(file)  # the library would wait for ever at a pipe
        return ssl.create_default_context(cafile=file)
    except OSError as error:
        raise PeerError(f"agent.peer_ca_file {file} holds no certificates that can be used: {error}") from error


def _authorization(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    try:
        user, colon, password = read_settings(file).decode().strip().partition(":")
    except (OSError, UnicodeDecodeError) as error:
        raise PeerError(f"agent.peer_credentials_file {file} cannot be read: {error}") from error
    if not (user and colon):
        raise PeerError(f"agent.peer_credentials_file {file} does not hold USER:PASSWORD")
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}


def job_nodes(settings: Settings) -> JobNodes | None:
    """For an agent with these settings; None without Slurm or on a loopback address, as it has no peers then.

    Raises PeerError.
    """
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
