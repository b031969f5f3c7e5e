"""Slurm without a cluster: recorded outputs of its commands, and a small cluster in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from opsd.slurm.port import (
    Given,
    Job,
    JobDetails,
    Node,
    NodeUpdate,
    Partition,
    Reservation,
    SlurmDenied,
    SlurmError,
    SlurmRejected,
    Version,
)
from opsd.slurm.runner import Output

RECORDED = Path(__file__).parent / "slurm_recorded"
RELEASES = sorted(path.stem for path in RECORDED.glob("*.json"))
SEPARATOR = "\x1fopsd\x1f"
RELEASE = Version(22, 5, 8)


class RecordedRunner:
    """A runner that answers what the commands of a real Slurm answered; see tests/integration/slurm/record.py."""

    def __init__(self, version: str) -> None:
        recorded = json.loads((RECORDED / f"{version}.json").read_text())
        self._outputs = {command: Output(*output) for command, output in recorded.items()}

    def __call__(self, argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        return self._outputs[" ".join(argv)]


class FakeSlurm:
    """A cluster in memory. ``error`` is raised by every call while it is set; ``operator`` may update nodes."""

    def __init__(
        self,
        nodes: Sequence[Node],
        *,
        jobs: Sequence[Job] = (),
        partitions: Sequence[Partition] = (),
        config: Mapping[str, str] | None = None,
        operator: bool = True,
        version: Version = RELEASE,
    ) -> None:
        self.by_name = {node.name: node for node in nodes}
        self.error: SlurmError | None = None
        self.updates: list[tuple[tuple[str, ...], str, str]] = []
        self.reboots: list[tuple[str, str]] = []
        self.by_comment: dict[str, str] = {}
        self.summaries: dict[int, str] = {}
        self.by_gpu: dict[tuple[int, str], frozenset[int] | None] = {}
        self.by_share: dict[tuple[int, str], frozenset[int]] = {}
        self.by_details: dict[int, JobDetails] = {}
        self.scripts: dict[int, str] = {}
        self.sluids: dict[int, str] = {}
        self._jobs = list(jobs)
        self._partitions = partitions
        self._config = config or {}
        self._operator = operator
        self._version = version

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error

    @property
    def version(self) -> Version:
        self._answer()
        return self._version

    def responds(self) -> bool:
        return self.error is None

    def configuration(self) -> Mapping[str, str]:
        self._answer()
        return self._config

    def nodes(self, names: Sequence[str] = ()) -> Sequence[Node]:
        self._answer()
        return [node for name, node in sorted(self.by_name.items()) if not names or name in names]

    def update_nodes(self, names: Sequence[str], update: NodeUpdate, reason: str = "") -> None:
        self._answer()
        if not self._operator:
            raise SlurmDenied("scontrol update: Invalid user id")
        if unknown := set(names) - set(self.by_name):
            raise SlurmRejected(f"scontrol update: Invalid node name specified: {unknown}")
        self.updates.append((tuple(names), update, reason))
        for name in names:
            self.by_name[name] = _updated(self.by_name[name], update, reason)

    def reboot(self, name: str, reason: str) -> None:
        self._answer()
        self.reboots.append((name, reason))

    def comments(self, names: Sequence[str] = ()) -> Mapping[str, str]:
        return {node.name: self.by_comment.get(node.name, "") for node in self.nodes(names)}

    def set_comment(self, name: str, text: str) -> None:
        self._answer()
        if not self._operator:
            raise SlurmDenied("scontrol update: Invalid user id")
        self.by_comment[name] = text

    def jobs(self, ids: Sequence[int] = (), *, node: str = "") -> Sequence[Job]:
        self._answer()
        return [job for job in self._jobs if (not ids or job.id in ids) and (not node or node in job.nodes)]

    def steps(self, job: int) -> Mapping[str, frozenset[str]]:
        return {str(step): frozenset(found.nodes) for step, found in enumerate(self.jobs([job]))}

    def given(self, job: int, node: str) -> Given:
        self._answer()
        place = job, node
        return Given(self.by_gpu.get(place), self.sluids.get(job, ""), self.by_share.get(place, frozenset()))

    def details(self, job: int) -> JobDetails:
        self._answer()
        return self.by_details.get(job, JobDetails({}))

    def script(self, job: int) -> str:
        self._answer()
        return self.scripts.get(job, "#!/bin/sh\n")

    def complete(self, job: int, code: int) -> None:
        self._answer()

    def requeue(self, job: int) -> None:
        self._answer()

    def set_start_time(self, job: int, at: float | None = None) -> None:
        self._answer()

    def start_after(self, job: int, other: int) -> None:
        self._answer()

    def exclude(self, job: int, names: Sequence[str], at: float) -> None:
        self._answer()

    def excluded(self, job: int) -> Mapping[str, float]:
        self._answer()
        return {}

    def include(self, job: int, names: Sequence[str]) -> None:
        self._answer()

    def summarize(self, job: int, text: str, topic: str = "run") -> None:
        self._answer()
        self.summaries[job] = text

    def shrink(self, job: int, names: Sequence[str]) -> None:
        self._answer()

    def release(self, job: int) -> None:
        self._answer()

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        self._answer()
        return 1

    def cancel(self, job: int) -> None:
        self._answer()

    def partitions(self) -> Sequence[Partition]:
        self._answer()
        return self._partitions

    def reservations(self) -> Sequence[Reservation]:
        self._answer()
        return []

    def reserve(self, name: str, settings: Mapping[str, str]) -> None:
        self._answer()

    def unreserve(self, name: str) -> None:
        self._answer()


def _updated(node: Node, update: NodeUpdate, reason: str) -> Node:
    if update == "drain":
        return replace(node, flags=node.flags | {"drain"}, reason=reason, reason_by="root")
    if update == "down":
        return replace(node, state="down", reason=reason, reason_by="root")
    return Node(node.name, "idle")


def cluster(*nodes: Node, idle: int = 20, operator: bool = True) -> FakeSlurm:
    """``nodes``, and ``idle`` more called n00, n01 …"""
    return FakeSlurm([*nodes, *(Node(f"n{number:02d}", "idle") for number in range(idle))], operator=operator)


def held(name: str, at: float = 1_763_700_000.0 - 100) -> Node:
    """A node that opsd has drained at the epoch second ``at``."""
    return Node(name, "idle", frozenset({"drain"}), "opsd:manual gpu_xid: Xid 79", "root", at)
