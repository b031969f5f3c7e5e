"""A Slurm in memory whose job goes through a requeue as Slurm's own jobs do."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from opsd.slurm.port import Job, Node, NodeUpdate, SlurmDenied, SlurmRejected, SlurmUnavailable
from tests.fakes.slurm import FakeSlurm

HELPER = 8
COMPLETING_LOOKS = 2
"""How often a job is seen completing once nothing holds it up."""


def running(*nodes: str, user: str = "alice", restarts: int = 0) -> Job:
    """Job 7 on ``nodes``, the first of which is its batch host."""
    return Job(7, "running", "", user, "train", nodes, nodes[0], 0.0, 0.0, None, restarts, "train")


class FakeQueue(FakeSlurm):
    """One job. A node in ``dead`` holds it up while it completes, unless it was taken down or the job has shrunk.

    ``calls`` are the requests that changed something, ``submitted`` the scripts and their options. The controller is
    away at the requests whose numbers are in ``away``; a requeue counts twice, and may be carried out unheard. A job
    that is completing takes no changes, and one that ``needs_all`` nodes is held once one is excluded.
    ``excluded_at`` are those that opsd keeps it off, ``with_steps`` the nodes on which it has steps. A helper that
    was submitted runs if there is ``room`` for it. Slurm ``refuses`` "submit", "start_after"
    or "complete".
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        job: Job,
        *,
        dead: Sequence[str] = (),
        operator: bool = True,
        owner: bool = True,
        needs_all: bool = False,
        away: Container[int] = (),
        room: bool = False,
        refuses: str = "",
    ) -> None:
        super().__init__(nodes, operator=operator, config={"SlurmdTimeout": "300 sec", "SlurmdPort": "7003"})
        self.job = job
        self.with_steps = set(job.nodes)
        self._room = room
        self._refuses = refuses
        self.calls: list[str] = []
        self.submitted: list[tuple[str, tuple[str, ...]]] = []
        self._needs_all = needs_all
        self.excluded_at: dict[str, float] = {}
        self._away = away
        self._requests = 0
        self._dead = dead
        self._owner = operator or owner
        self._looks = 0
        self.stuck: tuple[str, str] = ("", "")
        """A helper with this option never starts, for that reason."""

    def _answer(self) -> None:
        super()._answer()
        self._requests += 1
        if self._requests in self._away:
            raise SlurmUnavailable("the controller is away")

    def jobs(self, ids: Sequence[int] = (), *, node: str = "") -> Sequence[Job]:
        self._answer()
        if self.job.state == "completing" and not self._held_up():
            self._looks += 1
            if self._looks > COMPLETING_LOOKS:
                again = self.job.restarts + 1
                self.job = replace(self.job, state="pending", reason="BeginTime", nodes=(), restarts=again)
        state, why = ("running", "") if self._room else ("pending", "Resources")
        if self.submitted and self.stuck[0] in self.submitted[-1][1]:
            state, why = "pending", self.stuck[1]
        helper = [replace(self.job, id=HELPER, state=state, reason=why, nodes=())]
        known = [self.job, *(helper if self.submitted else [])]
        return [found for found in known if not ids or found.id in ids]

    def steps(self, job: int) -> Mapping[str, frozenset[str]]:
        self._answer()
        return {"0": frozenset(self.with_steps)}

    def _held_up(self) -> bool:
        return any(name in self._dead and self.by_name[name].state != "down" for name in self.job.nodes)

    def update_nodes(self, names: Sequence[str], update: NodeUpdate, reason: str = "") -> None:
        super().update_nodes(names, update, reason)
        self.calls.append(f"{update} {' '.join(names)}")

    def requeue(self, job: int) -> None:
        self._change()
        self.calls.append("requeue")
        self.job = replace(self.job, state="completing")
        self._answer()

    def complete(self, job: int, code: int) -> None:
        self._change()
        self._refuse("complete")
        self.calls.append(f"complete {code}")
        self.job = replace(self.job, state="completing")

    def cancel(self, job: int) -> None:
        self._answer()
        self.calls.append(f"cancel {job}")

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        self._answer()
        assert "requeue" in self.calls or all(call == f"cancel {HELPER}" for call in self.calls)
        self._refuse("submit")
        self.submitted.append((script, tuple(options)))
        return HELPER

    def shrink(self, job: int, names: Sequence[str]) -> None:
        self._change()
        if self.job.batch_host not in names:
            raise SlurmRejected("scontrol update: Invalid node name specified")
        self.calls.append(f"shrink to {' '.join(names)}")
        self.job = replace(self.job, nodes=tuple(names))

    def exclude(self, job: int, names: Sequence[str], at: float) -> None:
        self._change("pending")
        self.calls.append(f"exclude {' '.join(names)}")
        self.excluded_at |= dict.fromkeys(names, at)

    def excluded(self, job: int) -> Mapping[str, float]:
        self._answer()
        return dict(self.excluded_at)

    def include(self, job: int, names: Sequence[str]) -> None:
        self._change("pending")
        self.calls.append(f"include {' '.join(names)}")
        for name in names:
            self.excluded_at.pop(name, None)

    def set_start_time(self, job: int, at: float | None = None) -> None:
        self._change("pending")
        self.calls.append("start")
        held = self.excluded_at and self._needs_all
        self.job = replace(self.job, reason="BadConstraints" if held else "Resources")

    def start_after(self, job: int, other: int) -> None:
        self._change("pending")
        self._refuse("start_after")
        self.calls.append(f"after {other}")

    def release(self, job: int) -> None:
        self._change("pending")
        self.calls.append("release")
        self.job = replace(self.job, state="pending", reason="BeginTime")

    def _refuse(self, request: str) -> None:
        if request == self._refuses:
            raise SlurmRejected("scontrol: Requested operation is presently disabled")

    def _change(self, *states: str) -> None:
        self._answer()
        if not self._owner:
            raise SlurmDenied("scontrol: Access/permission denied; this needs root, or the owner of the job")
        if self.job.state not in (states or ("running",)):
            raise SlurmRejected("scontrol: Requested operation is presently disabled")


def queue(*, restarts: int = 0, **more: Any) -> FakeQueue:
    """A job of n1, n2 and n3 on a cluster of four."""
    nodes = [Node(name, "idle") for name in ("n1", "n2", "n3", "n4")]
    return FakeQueue(nodes, running("n1", "n2", "n3", restarts=restarts), **more)
