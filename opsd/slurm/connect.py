"""Which implementation of the Slurm port to use on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from opsd.slurm.bindings import PyslurmSlurm, Worker, why_not_pyslurm
from opsd.slurm.commands import DEADLINE_S, CommandSlurm
from opsd.slurm.port import Job, Slurm


class Choice(NamedTuple):
    """The implementation to use; ``no_bindings`` is why it is not pyslurm, "" if it is."""

    slurm: Slurm
    no_bindings: str


def choose(deadline_s: float = DEADLINE_S) -> Choice:
    """This machine's Slurm; each call takes at most ``deadline_s`` seconds.

    Uses pyslurm where possible (3 ms a call, and a separate process of about 25 MiB), otherwise Slurm's commands (5 to
    30 ms a call). Does not contact the controller yet.
    """
    commands = CommandSlurm(deadline_s=deadline_s)
    if find_spec("pyslurm") is None:
        return Choice(commands, "pyslurm is not installed")
    worker = Worker(deadline_s=deadline_s)
    no_bindings = why_not_pyslurm(worker, commands)
    return Choice(commands if no_bindings else PyslurmSlurm(worker, deadline_s=deadline_s), no_bindings)


def known_jobs(ids: Sequence[int]) -> Sequence[Job]:
    """Those of ``ids`` that this machine's Slurm still knows; see ``Slurm.jobs``. Raises SlurmError."""
    return choose().slurm.jobs(ids)
