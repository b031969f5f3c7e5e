"""How agent and preflight have their node repaired: by a file, for which ``opsd-repair.path`` waits.

The agent has neither the rights nor the memory for a repair, and nothing to do for it between drain and return.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from opsd.repair.case_file import CaseError, CaseFile
from opsd.slurm.port import SlurmUnavailable


class Ordering:
    """Drains with ``drain``, then orders the repair if ``acting``, and says else that there could be one."""

    def __init__(self, drain: Callable[[str, str], str], state_dir: Path, *, acting: bool) -> None:
        self._drain, self._file, self._acting = drain, CaseFile(state_dir), acting

    def __call__(self, node: str, reason: str) -> str:
        """See ``opsd.agent.actions.Drainer``. A drain that waits for Slurm is ordered a repair, too."""
        try:
            done = self._drain(node, reason)
        except SlurmUnavailable:
            self._order()
            raise
        return f"{done}; {self._order()}"

    def _order(self) -> str:
        if not self._acting:
            return "`opsd repair --act` on it would repair it (policy.repair is recommend)"
        try:
            self._file.order()
        except CaseError as error:
            return f"its repair was not ordered: {error}"
        return "its repair is ordered"
