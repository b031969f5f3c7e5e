"""Draining this node in Slurm: off unless configured, within the cluster's budget, never without Slurm's answer."""

from __future__ import annotations

from collections.abc import Callable

from opsd.agent.actions import ActionError
from opsd.slurm import budget
from opsd.slurm.drain import OWN_PREFIX, drain, give_back
from opsd.slurm.port import Slurm, SlurmError


class SlurmDrainer:
    """Drains ``node`` while opsd holds less than ``share`` of all nodes. ``slurm`` is called at each use."""

    def __init__(self, slurm: Callable[[], Slurm], node: str, share: float) -> None:
        self._connect, self._node, self._share = slurm, node, share

    def __call__(self, node: str, reason: str) -> str:
        """Drain ``node`` and say what was done. Raises ActionError.

        Agents of several nodes may see the same free place and take it at the same time. Each looks again afterwards,
        and those who came last give their node back.
        """
        if node != self._node:
            raise ActionError(f"this agent drains {self._node} only, not {node}")
        try:
            slurm = self._connect()
            if refusal := budget.why_not(slurm.nodes(), node, self._share):
                raise ActionError(refusal)
            fresh = drain(slurm, [node], f"{OWN_PREFIX} {reason}")
            if fresh and budget.surplus(slurm.nodes(), node, self._share):
                give_back(slurm, [node])
                raise ActionError("other agents have drained their nodes at the same time; this one was given back")
        except (SlurmError, ValueError) as error:
            raise ActionError(f"Slurm: {error}") from error
        return f"drained {node}" if fresh else f"{node} was drained by opsd already"
