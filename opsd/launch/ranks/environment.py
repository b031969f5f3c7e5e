"""The environment of a rank: torchrun's variables and opsd's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from opsd.launch.ranks.membership import Assignment
from opsd.launch.ranks.process import LAUNCHER, launcher_mark

VARYING = frozenset(
    [
        *("MASTER_ADDR", "MASTER_PORT", "OPSD_GENERATION", "OPSD_RANK_PAGE", "TORCHELASTIC_ERROR_FILE"),
        "TORCHELASTIC_RESTART_COUNT",
    ]
)
"""What may differ at every restart of the same rank. The page is the living rank's: a standby is told of another."""
OF_A_GENERATION = VARYING | frozenset(
    [
        *("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
        *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    ]
)
"""What a rank is told at its start: all of ``generation_environment``."""


def launch_environment(
    base: Mapping[str, str], *, local_rank: int, local_size: int, run: str, run_dir: Path, job: str, node: str
) -> dict[str, str]:
    """What stays the same over all generations of a rank, and whatever its place among the nodes."""
    gpu = gpu_of(base, local_rank)
    threads = {"OMP_NUM_THREADS": "1"} if local_size > 1 else {}
    return {
        **threads,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **base,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        LAUNCHER: launcher_mark(),
        "OPSD_RUN": run,
        "OPSD_RUN_DIR": str(run_dir),
        "OPSD_JOB": job,
        "OPSD_NODE": node,
        "OPSD_GPU": "" if gpu is None else str(gpu),
    }


def generation_environment(
    place: Assignment,
    *,
    local_rank: int,
    generation: int,
    restarts: int,
    max_restarts: int,
    run_id: str,
    role: str,
    error_file: Path,
    page: Path,
) -> dict[str, str]:
    """What a rank is told at its start: its place, and what is of this generation alone."""
    rank = str(place.rank_offset + local_rank)
    world = str(place.world_size)
    return {
        "RANK": rank,
        "WORLD_SIZE": world,
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": role,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "OPSD_RANK_PAGE": str(page),
        "OPSD_GENERATION": str(generation),
    }


def gpu_of(env: Mapping[str, str], local_rank: int, proc: str = "/proc") -> int | None:
    """The index of the GPU that ``local_rank`` will use, None without GPUs or if they are named by UUID."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return local_rank if local_rank < gpu_count(env, proc) else None
    entries = [entry.strip() for entry in visible.split(",")]
    return int(entries[local_rank]) if local_rank < len(entries) and entries[local_rank].isdigit() else None


def gpu_count(env: Mapping[str, str], proc: str = "/proc") -> int:
    """GPUs that a rank may use: those in CUDA_VISIBLE_DEVICES if set, otherwise those the NVIDIA driver lists."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    try:
        return len(list(Path(proc, "driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0
