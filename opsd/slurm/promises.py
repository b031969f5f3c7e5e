"""The promises of ``opsd slurm run`` that a job can keep, from the options of the job. Pure.

Slurm does not tell of a running job whether it has --no-kill and --signal. So the batch script is read, which its owner
may have back from Slurm, and the command line of sbatch where Slurm keeps it (25.11).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from opsd.slurm.check import Fact
from opsd.slurm.port import JobDetails
from opsd.slurm.sbatch_script import Script, Signal, read_script, seconds_of, signal_of

SAVED_AT = frozenset({signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals at which the launchers let the run save and end."""
HETEROGENEOUS = (
    "a heterogeneous job cannot keep what opsd promises: Slurm starts only the first part's batch script, and requeues "
    "that part when a node dies, in spite of --no-kill. Ask for all nodes in one part, or submit each part as a job"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a job, None or "" if not given as far as is known; ``surely`` says whether that is certain.

    ``read`` is False if the batch script could not be read: nothing is known then but what Slurm tells itself.
    ``refused`` says why sbatch does not take the script.
    """

    no_kill: bool | None = None
    requeue: bool | None = None
    signal: Signal | None = None
    open_mode: str = ""
    time: str = ""
    heterogeneous: bool = False
    nodes: str = ""
    tasks_per_node: bool = False
    batch: bool = True
    surely: bool = True
    read: bool = True
    refused: str = ""

    @property
    def appends(self) -> bool:
        """Whether each start appends to the job's output."""
        return self.open_mode[:1].lower() == "a"


def of_script(text: str, environ: Mapping[str, str] = MappingProxyType({})) -> Asked:
    """The options that sbatch takes from a batch script, and from the variables of the user who submits it."""
    return _asked(read_script(text, environ))


def of_job(details: JobDetails, script: str | None, environ: Mapping[str, str] = MappingProxyType({})) -> Asked:
    """The options of a job that Slurm knows, from its batch script and, where Slurm has it, sbatch's command line.

    ``environ`` is that of the job, which has the SBATCH variables of the user.
    """
    found = _asked(read_script(script or "", environ, details.submitted.split()[1:], whole=False))
    return replace(
        found,
        requeue=found.requeue if details.requeues is None else details.requeues,
        heterogeneous=details.heterogeneous,
        batch=details.batch,
        surely=bool(details.submitted),
        read=script is not None or not details.batch,
        refused="",
    )


def _asked(script: Script) -> Asked:
    found = script.options
    requeue = [name == "requeue" for name in found if name in ("requeue", "no-requeue")]
    return Asked(
        no_kill=found["no-kill"].lower() not in ("off", "no") if "no-kill" in found else None,
        requeue=requeue[-1] if requeue else None,
        signal=signal_of(script.signals),
        open_mode=found.get("open-mode", ""),
        time=found.get("time", ""),
        heterogeneous=script.heterogeneous,
        nodes=found.get("nodes", ""),
        tasks_per_node="ntasks-per-node" in found,
        refused=script.refused,
    )


def broken(asked: Asked, job: int = 0) -> Iterator[str]:
    """What opsd promises and the job cannot keep, a sentence each; ``job`` is its number if it runs."""
    submit = "sbatch" if asked.batch else "salloc"
    if not asked.batch:
        yield "salloc has no batch script to start again: the run ends with 75 where a batch job would be requeued"
    if not asked.no_kill and asked.read:
        unless = "" if asked.surely else f", unless --no-kill was on the command line of {submit}"
        yield (
            f"Slurm ends the job once it notices that a node has died, also when a spare has its place{unless}: "
            + ("add #SBATCH --no-kill to the batch script" if asked.batch else "use salloc --no-kill")
        )
    if asked.requeue is False and asked.batch:
        now = f"; scontrol update JobId={job} Requeue=1 changes it now" if job else ""
        yield (
            "the job is never put back into the queue (--no-requeue): where that is needed, the run is saved and the "
            f"job ends with 75. Add #SBATCH --requeue to the batch script{now}"
        )
    if asked.signal is not None:
        yield from _useless(asked.signal, seconds_of(asked.time))


def _useless(asked: Signal, limit_s: float | None) -> Iterator[str]:
    """Why the run may not be saved at the signal before the time limit of ``limit_s`` seconds."""
    given = f"--signal={asked.text}"
    if asked.script_alone:
        yield f"{given} reaches the batch script alone, which may die with its node: leave out B:"
    if asked.number is None:
        yield f"{given} is none that sbatch takes: use --signal=USR1@300"
    elif asked.number not in SAVED_AT:
        yield f"at {given} the run is not saved: use --signal=USR1@300"
    elif asked.notice_s == 0:
        yield f"{given} is never sent, as it would come at the time limit itself: use --signal=USR1@300"
    elif limit_s is not None and asked.notice_s >= limit_s:
        yield f"{given} comes at the start, since the time limit is {limit_s:.0f} s: make the limit longer"


def facts(asked: Asked, job: int = 0) -> tuple[Fact, ...]:
    """All that can be said, for ``opsd slurm check``."""
    if asked.refused:
        return (Fact(False, f"sbatch does not take this script: {asked.refused}"),)
    if asked.heterogeneous:
        return (Fact(False, HETEROGENEOUS),)
    kept = []
    if asked.no_kill:
        kept.append(Fact(True, "a node that dies does not end the job (--no-kill)"))
    if asked.requeue and asked.batch:
        kept.append(Fact(True, "the job goes back into the queue when it needs other nodes (--requeue)"))
    if asked.requeue is None and asked.batch:
        kept.append(Fact(None, "whether the job may be requeued is JobRequeue in slurm.conf: better add --requeue"))
    softer = _softer(asked) if asked.read and asked.batch else ()
    return (*kept, *(Fact(False, text) for text in broken(asked, job)), *softer)


def _softer(asked: Asked) -> Iterator[Fact]:
    """What costs no promise, or only some of the time."""
    if asked.signal is None:
        yield Fact(
            None,
            "without --signal=USR1@300 the run is told to stop only at its time limit, and may be killed before it is "
            "saved",
        )
    elif not any(_useless(asked.signal, seconds_of(asked.time))):
        yield Fact(True, f"the launchers are told to save before the time limit (--signal={asked.signal.text})")
    if not asked.appends:
        yield Fact(None, "each start overwrites the job's output: add --open-mode=append")
    if "-" in asked.nodes and asked.tasks_per_node:
        yield Fact(False, "with --ntasks-per-node Slurm gives a range of nodes its lower number: no spares (22.05)")
    if not asked.surely:
        yield Fact(None, "options on the command line of sbatch are not known to this Slurm, and count as not given")
