"""How agent and preflight have their node repaired: by a file, for which ``opsd-repair.path`` waits.

The agent has neither the rights nor the memory for a repair, and nothing to do for it between drain and return.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from opsd.repair.case_file import CaseError, CaseFile
from opsd.repair.faults import curable
from opsd.slurm.port import SlurmUnavailable

if TYPE_CHECKING:  # the agent needs none of these
    from opsd.config import Settings
    from opsd.preflight.quarantine import Drain
    from opsd.preflight.report import Report


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


def after_preflight(report: Report, settings: Settings, drain: Drain) -> Drain:
    """``drain``, which also orders the node's repair if that may be done and can cure what has failed."""
    if settings.policy.repair == "observe" or not curable(result.check for result in report.results if result.failed):
        return drain
    return Ordering(drain, settings.agent.state_dir, acting=settings.policy.repair == "act")
