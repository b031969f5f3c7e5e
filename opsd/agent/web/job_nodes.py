"""The state of a job on its other nodes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from opsd.agent.web.other_agents import OtherAgents, OtherNodes


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
