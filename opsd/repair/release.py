"""Nodes that a run has left: their job gives them back, so that they can be repaired while the run goes on.

A planned swap takes a node out of the run, not out of its job's allocation, which may last for weeks. Nobody is
believed about a job but its own user: the launcher that says so has to be that user's.
"""

from __future__ import annotations

import json
import pwd
from collections.abc import Mapping, Sequence
from pathlib import Path

from opsd.control import ControlError, ask_launcher
from opsd.files import read_settings
from opsd.slurm.port import Job, Slurm, SlurmError

RUNNING = "running"


def release(slurm: Slurm, node: str, jobs: Sequence[Job], root: Path) -> str:
    """Reduce the ``jobs`` that have ``node`` and no ranks on it to their other nodes, and say what was done.

    "" if nothing was. ``root`` is the folder of the runs in shared memory. The node of a batch script stays: Slurm
    would end the job.
    """
    done = []
    for job in jobs:
        others = [name for name in job.nodes if name != node]
        if job.state != RUNNING or not others or job.batch_host == node or not has_left(job, node, root):
            continue
        try:
            slurm.shrink(job.id, others)
        except SlurmError as error:
            done.append(f"job {job.id} keeps {node}: {error}")
        else:
            done.append(f"job {job.id} goes on without {node}, which its run has left")
    return "; ".join(done)


def has_left(job: Job, node: str, root: Path) -> bool:
    """Whether the launchers of ``job`` on this node all say that their runs have ranks on other nodes of it only.

    A run whose nodes have names of its own (``--node-name``) says nothing about Slurm's.
    """
    try:
        owner = pwd.getpwnam(job.user).pw_uid
    except KeyError:
        return False
    answers = [_places(folder) for folder in root.glob("*") if _is_of(folder, job, owner)]
    others = frozenset(job.nodes) - {node}
    return bool(answers) and all(places and others.issuperset(places) for places in answers)


def _is_of(folder: Path, job: Job, owner: int) -> bool:
    """Whether this is the folder of a run of ``job`` that its own user has made."""
    try:
        if folder.lstat().st_uid != owner:
            return False
        told = json.loads(read_settings(folder / "run.json", follow=False))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(told, dict) and str(told.get("job")) == str(job.id)


def _places(folder: Path) -> Sequence[str]:
    """The nodes on which the run has ranks; empty if its launcher does not say."""
    try:
        status: Mapping[str, object] = ask_launcher(folder / "control.sock", {"cmd": "status"})
    except ControlError:
        return ()
    nodes = status.get("nodes")
    return [str(name) for name in nodes] if isinstance(nodes, list) else ()
