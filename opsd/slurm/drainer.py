"""Draining this node in Slurm: off unless configured, by the rules of the cluster, never without Slurm's answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from opsd.slurm import ownership
from opsd.slurm.deferred import DeferredUpdate, DeferredUpdates
from opsd.slurm.drain import OWN_PREFIX
from opsd.slurm.ownership import Rules
from opsd.slurm.port import Slurm, SlurmError, SlurmRejected, SlurmUnavailable


class SlurmDrainer:
    """Drains ``node`` within ``rules``. ``slurm`` is called at each use.

    What Slurm did not answer to waits in ``updates``, if there are any, and is done once it answers.
    """

    def __init__(
        self, slurm: Callable[[], Slurm], node: str, rules: Rules, updates: DeferredUpdates | None = None
    ) -> None:
        self._connect, self._node, self._rules, self._updates = slurm, node, rules, updates

    def __call__(self, node: str, reason: str) -> str:
        """Drain ``node`` and say what was done; ``reason`` gets opsd's prefix if it lacks it. Raises SlurmError.

        Agents of several nodes may see the same free place and take it at the same time. Each looks again afterwards,
        and those who came last give their node back.
        """
        if node != self._node:
            raise SlurmRejected(f"this agent drains {self._node} only, not {node}")
        told = reason if reason.startswith(OWN_PREFIX) else f"{OWN_PREFIX} {reason}"
        try:
            fresh = ownership.drain(self._connect(), [node], told, self._rules)
        except SlurmUnavailable as error:
            raise SlurmUnavailable(f"Slurm: {error}{self._later(node, told)}") from error
        except (SlurmError, ValueError) as error:
            raise SlurmRejected(f"Slurm: {error}") from error
        return f"drained {node}" if fresh else f"{node} was drained by opsd already"

    def _later(self, node: str, told: str) -> str:
        if self._updates is not None:
            with suppress(OSError):
                self._updates.put(DeferredUpdate("drain", (node,), time.time(), told))
                return f"; {node} is drained once Slurm answers"
        return ""
