"""Nodes that a run has left: their job gives them back, so that they can be repaired while the run goes on.

A planned swap takes a node out of the run, not out of its job's allocation, which may last for weeks. Nobody is
believed about a job but its own user: the launcher that says so has to be that user's.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping, Sequence
from pathlib import Path

from opsd.collectors.lib.gpu_owners import ENVIRONMENT_BYTES
from opsd.collectors.lib.run_files import Rights, read_small
from opsd.control import ControlError, ask_launcher
from opsd.inodes import open_folder
from opsd.slurm.port import Job, Slurm, SlurmError

RUNNING = "running"


def release(slurm: Slurm, node: str, jobs: Sequence[Job], root: Path, proc: Path = Path("/proc")) -> str:
    """Reduce the ``jobs`` that have ``node`` and no ranks on it to their other nodes, and say what was done.

    "" if nothing was. ``root`` is the folder of the runs in shared memory. The node of a batch script stays: Slurm
    would end the job. So does one with any other step of the job, which Slurm would end.
    """
    done = []
    for job in jobs:
        others = [name for name in job.nodes if name != node]
        if job.state != RUNNING or not others or job.batch_host == node:
            continue
        launchers = launchers_that_left(job, node, root, proc)
        if not launchers:
            continue
        try:
            if more := [step for step, nodes in slurm.steps(job.id).items() if node in nodes and step not in launchers]:
                done.append(f"job {job.id} keeps {node}: its step {', '.join(more)} is not one of the run's launchers")
                continue
            slurm.shrink(job.id, others)
        except SlurmError as error:
            done.append(f"job {job.id} keeps {node}: {error}")
        else:
            done.append(f"job {job.id} goes on without {node}, which its run has left")
    return "; ".join(done)


def launchers_that_left(job: Job, node: str, root: Path, proc: Path) -> frozenset[str]:
    """The steps of the launchers of ``job`` on this node, if all say that their runs have ranks on its others only.

    Empty if one does not; "" is a launcher whose step is unknown. A run whose nodes have names of its own
    (``--node-name``) says nothing about Slurm's.
    """
    try:
        owner = pwd.getpwnam(job.user).pw_uid
    except KeyError:
        return frozenset()
    runs = {folder: run for folder in root.glob("*") if (run := _run_of(folder, job, owner)) is not None}
    others = frozenset(job.nodes) - {node}
    if not all((places := _places(folder)) and others.issuperset(places) for folder in runs):
        return frozenset()
    return frozenset(_step(proc, run.get("launcher_pid"), job) for run in runs.values())


def _run_of(folder: Path, job: Job, owner: int) -> Mapping[str, object] | None:
    """The facts of a run of ``job`` whose folder its own user has made, None if this is none."""
    try:
        descriptor = open_folder(folder)
    except OSError:
        return None
    try:
        own = os.fstat(descriptor).st_uid == owner
        found = read_small("run.json", descriptor, Rights(owner, frozenset())) if own else None
        told = json.loads(found[0]) if found else None
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    return told if isinstance(told, dict) and str(told.get("job")) == str(job.id) else None


def _step(proc: Path, pid: object, job: Job) -> str:
    """The step of ``job`` that the process belongs to by its environment, "" if that does not say."""
    if not isinstance(pid, int):  # a user wrote it
        return ""
    try:
        with open(proc / str(pid) / "environ", "rb", buffering=0) as file:
            lines = file.read(ENVIRONMENT_BYTES).split(b"\0")
    except OSError:
        return ""
    variables = dict(line.decode(errors="replace").partition("=")[::2] for line in lines)
    return variables.get("SLURM_STEP_ID", "") if variables.get("SLURM_JOB_ID") == str(job.id) else ""


def _places(folder: Path) -> Sequence[str]:
    """The nodes on which the run has ranks; empty if its launcher does not say."""
    try:
        status: Mapping[str, object] = ask_launcher(folder / "control.sock", {"cmd": "status"})
    except ControlError:
        return ()
    nodes = status.get("nodes")
    return [str(name) for name in nodes] if isinstance(nodes, list) else ()
