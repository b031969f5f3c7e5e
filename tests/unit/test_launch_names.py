"""What runs are called: the same on all nodes and over requeues, and never the same for two runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.commands.launch_settings import name_of_nodes, name_of_one_node

JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "4", "SLURM_PROCID": "0"}
CWD = Path("/home/me")
TRAIN = ("script", "train.py", "--lr", "1e-3")


@pytest.mark.parametrize(
    ("env", "rdzv_id", "common", "name"),
    [
        (JOB, None, "", "job-77"),
        (JOB, "77", "n1-29500", "job-77"),
        (JOB, "my exp", "", "job-77-my-exp-"),
        (JOB, None, "n1-29500", "job-77"),
        ({**JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "2"}, None, "", "job-77-step-3"),
        ({**JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "4"}, None, "", "job-77"),
        ({**JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "1"}, None, "", "job-77"),
        ({**JOB, "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "6"}, None, "", "job-70_6"),
        ({}, "456", "n1-29500", "456"),
        ({}, None, "n1.cluster-29500", "n1.cluster-29500"),
        ({}, None, "fe80::1-29500", "fe80-1-29500-"),
        ({}, None, "n1=10.0.0.1,n2", "n1-10.0.0.1-n2-"),
        ({}, None, "", "run-"),
    ],
)
def test_nodes_of_a_run_come_to_the_same_name(env: dict[str, str], rdzv_id: str | None, common: str, name: str) -> None:
    """The job's, a part of it where a step has a part of its nodes, or what torchrun's nodes have in common."""
    found = name_of_nodes(env, rdzv_id, common)
    assert found.startswith(name) if name.endswith("-") else found == name


def test_requeued_job_of_one_node_goes_on() -> None:
    """Neither another node, nor another start, nor GPUs of other numbers make it another run."""
    before = {**JOB, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1", "SLURMD_NODENAME": "n1"}
    after = {**before, "SLURM_RESTART_COUNT": "1", "CUDA_VISIBLE_DEVICES": "4,5", "SLURMD_NODENAME": "n2"}
    assert name_of_one_node(before, None, CWD, TRAIN) == name_of_one_node(after, None, CWD, TRAIN)


@pytest.mark.parametrize(
    ("env", "rdzv_id", "program"),
    [
        (JOB, None, ("script", "train.py", "--lr", "1e-4")),
        ({**JOB, "SLURM_STEP_ID": "1"}, None, TRAIN),
        ({**JOB, "SLURM_PROCID": "1"}, None, TRAIN),
        ({**JOB, "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "4,5"}, None, TRAIN),
        ({**JOB, "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "6"}, None, TRAIN),
        ({**JOB, "SLURM_JOB_ID": "78"}, None, TRAIN),
        (JOB, "second", TRAIN),
        ({}, None, TRAIN),
    ],
)
def test_launches_of_one_node_in_a_job_are_different_runs(
    env: dict[str, str], rdzv_id: str | None, program: tuple[str, ...]
) -> None:
    """A sweep has other arguments, steps, tasks, GPUs or rendezvous ids."""
    assert name_of_one_node(env, rdzv_id, CWD, program) != name_of_one_node(JOB, None, CWD, TRAIN)


def test_batch_step_is_no_step() -> None:
    """Releases of Slurm differ in whether the batch script sees a step, with a number far above the real ones."""
    batch = {**JOB, "SLURM_STEP_ID": "4294967291"}
    assert name_of_one_node(batch, None, CWD, TRAIN) == name_of_one_node(JOB, None, CWD, TRAIN)
