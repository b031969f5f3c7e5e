"""How the trainer hands its evaluations on: to a process that is no rank."""

from __future__ import annotations

from pathlib import Path

from opsd.launch.environment import generation_environment, launch_environment
from opsd.launch.membership import Assignment
from trainer.evaluations import of_no_rank


def test_an_evaluation_is_no_rank() -> None:
    """Nothing of what the launcher gives to its ranks alone is left, everything else is."""
    base = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "OPSD_CONFIG": "/etc/opsd.toml", "HOME": "/home/a"}
    kept = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1"}
    fixed = launch_environment(base, local_rank=0, local_size=2, run="r", run_dir=Path("/r"), job="1", node="n1")
    changing = generation_environment(
        Assignment(0, 2, 0, 2, 4, "n1", 29500), local_rank=0, generation=3, restarts=2, max_restarts=8, run_id="r",
        role="default", error_file=Path("/e"), page=Path("/p"),
    )  # fmt: skip
    assert of_no_rank({**fixed, **changing}) == base | kept
