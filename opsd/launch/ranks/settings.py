"""What the command line of ``opsd launch`` settles, in one frozen value."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from opsd.launch.ranks.environment import launch_environment
from opsd.launch.ranks.program import Program


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds throughout. ``shown``: local ranks whose output also goes to the console."""

    program: Program
    run: str
    job: str
    node: str
    local_size: int
    run_id: str
    role: str = "default"
    max_restarts: int = 8
    same_failures: int = 3
    refill_steps: int = 100
    standby: bool = True
    standby_imports: tuple[str, ...] = ()
    stop_timeout_s: float = 120.0
    shown: frozenset[int] = frozenset()

    def environment(self, local_rank: int, run_dir: Path) -> dict[str, str]:
        """What the environment of ``local_rank`` has in every generation: the launcher's own and opsd's."""
        return launch_environment(
            os.environ,
            local_rank=local_rank,
            local_size=self.local_size,
            run=self.run,
            run_dir=run_dir,
            job=self.job,
            node=self.node,
        )
