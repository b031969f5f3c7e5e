"""What a run is called when nobody says it with ``--run-id``.

The nodes of a run, and its starts after a requeue, must come to the same name by themselves; runs that have nothing to
do with each other must not, as a run goes on from what another start under its name has left.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from opsd.rundir import valid_name

_SPECIAL_STEPS = 4_294_967_290
"""Numbers from here on are Slurm's for the batch script and the like (slurm.h)."""


def name_of_nodes(env: Mapping[str, str], rdzv_id: str | None, common: str) -> str:
    """The name of a run of several nodes: the job's, or made of what the nodes have in ``common`` without Slurm."""
    job = _job(env)
    if rdzv_id and rdzv_id != env.get("SLURM_JOB_ID"):
        return valid_name(f"{job}-{rdzv_id}" if job else rdzv_id)
    if job:
        step = _step(env)
        inside = _number(env, "SLURM_STEP_NUM_NODES"), _number(env, "SLURM_JOB_NUM_NODES")
        return f"{job}-step-{step}" if step is not None and 1 < inside[0] < inside[1] else job
    return valid_name(common) if common else _timestamp()


def name_of_one_node(env: Mapping[str, str], rdzv_id: str | None, cwd: Path, program: Sequence[str]) -> str:
    """The name of a run of one node: in a job, one for each step, task, choice of GPUs and command line.

    A requeued job comes to the same name. Outside Slurm nothing starts a run again, so each has a name of its own.
    """
    job = _job(env)
    if not job:
        return _timestamp()
    known = [_step(env), env.get("SLURM_PROCID"), _chosen_gpus(env), rdzv_id, str(cwd), *program]
    mark = hashlib.blake2b(json.dumps(known).encode(), digest_size=4).hexdigest()
    return f"{job}-{mark}"


def _job(env: Mapping[str, str]) -> str:
    """``job-ID``, for a task of an array ``job-ID_TASK`` as Slurm shows it, "" outside Slurm."""
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID")
    return valid_name(f"job-{job}") if job else ""


def _step(env: Mapping[str, str]) -> int | None:
    step = _number(env, "SLURM_STEP_ID")
    return step if "SLURM_STEP_ID" in env and step < _SPECIAL_STEPS else None


def _chosen_gpus(env: Mapping[str, str]) -> str | None:
    """The GPUs that the script has picked out of the job's. All of them have other numbers after a requeue."""
    gpus = env.get("CUDA_VISIBLE_DEVICES")
    return gpus if gpus and len(gpus.split(",")) < _number(env, "SLURM_GPUS_ON_NODE") else None


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else 0


def _timestamp() -> str:
    return time.strftime("run-%Y%m%d-%H%M%S") + f"-{os.getpid()}"
