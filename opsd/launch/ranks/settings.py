"""What the command line of ``opsd launch`` settles, in one frozen value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opsd.launch.ranks.environment import launch_environment
from opsd.launch.ranks.program import Program


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds throughout. ``shown``: local ranks whose output also goes to the console.

    ``virtual_local_rank``: each rank sees its own GPU only and is the local rank 0, as far as it knows.
    """

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
    virtual_local_rank: bool = False

    def environment(self, local_rank: int, run_dir: Path) -> dict[str, str]:
        """What the environment of ``local_rank`` has in every generation: the launcher's own and opsd's."""
        environment = launch_environment(
            os.environ,
            local_rank=local_rank,
            local_size=self.local_size,
            run=self.run,
            run_dir=run_dir,
            job=self.job,
            node=self.node,
        )
        return own_gpu_only(environment, local_rank) if self.virtual_local_rank else environment


def own_gpu_only(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The environment of a rank that sees its own GPU alone, as device 0; ``OPSD_GPU`` stays the node's number."""
    gpus = [gpu.strip() for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    own = gpus[local_rank] if local_rank < len(gpus) else str(local_rank)
    return {**environment, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": own}
