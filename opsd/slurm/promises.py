"""The promises of ``opsd slurm run`` that a job can keep, from the options of the job. Pure.

Slurm does not tell of a running job whether it has --no-kill and --signal. So the batch script is read, which its owner
may have back from Slurm, and the command line of sbatch where Slurm keeps it (25.11).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType

from opsd.slurm.check import Fact
from opsd.slurm.port import JobDetails

_LONG = {"-k": "--no-kill", "-N": "--nodes", "-t": "--time"}
_WITHOUT_VALUE = ("--no-kill", "--requeue", "--no-requeue", "--exclusive")
"""Options after which the next word is no value of theirs."""
HETEROGENEOUS = (
    "a heterogeneous job cannot keep what opsd promises: Slurm starts only the first part's batch script, and requeues "
    "that part when a node dies, in spite of --no-kill. Ask for all nodes in one part, or submit each part as a job"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a job, None or "" if not given as far as is known; ``surely`` says whether that is certain.

    ``read`` is False if the batch script could not be read: nothing is known then but what Slurm tells itself.
    """

    no_kill: bool | None = None
    requeue: bool | None = None
    signal: str | None = None
    open_mode: str | None = None
    heterogeneous: bool = False
    nodes: str = ""
    tasks_per_node: bool = False
    batch: bool = True
    surely: bool = True
    read: bool = True


def of_script(text: str) -> Asked:
    """The options in the ``#SBATCH`` lines of a batch script."""
    parts = any(word in ("hetjob", "packjob") for word in _words(text))
    return replace(_of_options(sbatch_options(text)), heterogeneous=parts)


def of_job(details: JobDetails, script: str | None, environ: Mapping[str, str] = MappingProxyType({})) -> Asked:
    """The options of a job that Slurm knows, from its batch script and, where Slurm has it, sbatch's command line.

    ``environ`` is that of the job, which has the SBATCH variables of the user.
    """
    more = [*(["--no-kill"] if "SBATCH_NO_KILL" in environ else []), *details.submitted.split()]
    found = _of_options(sbatch_options(script or "", more))
    return replace(
        found,
        requeue=found.requeue if details.requeues is None else details.requeues,
        heterogeneous=details.heterogeneous,
        batch=details.batch,
        surely=bool(details.submitted),
        read=script is not None or not details.batch,
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
    if asked.signal and _is_for_script_alone(asked.signal):
        yield f"--signal={asked.signal} reaches the batch script alone, which may die with its node: leave out B:"


def facts(asked: Asked, job: int = 0) -> tuple[Fact, ...]:
    """All that can be said, for ``opsd slurm check``."""
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
    elif not _is_for_script_alone(asked.signal):
        yield Fact(True, f"the launchers are told to save before the time limit (--signal={asked.signal})")
    if (asked.open_mode or "").lower() not in ("append", "a"):
        yield Fact(None, "each start overwrites the job's output: add --open-mode=append")
    if "-" in asked.nodes and asked.tasks_per_node:
        yield Fact(False, "with --ntasks-per-node Slurm gives a range of nodes its lower number: no spares (22.05)")
    if not asked.surely:
        yield Fact(None, "options on the command line of sbatch are not known to this Slurm, and count as not given")


def _is_for_script_alone(signal: str) -> bool:
    who, colon, _ = signal.partition(":")
    return bool(colon) and "B" in who.upper()


def sbatch_options(script: str, more: Sequence[str] = ()) -> dict[str, str]:
    """The options in the ``#SBATCH`` lines of a batch script and then in ``more`` words, by their long names.

    The value is "" for those without one, and the last one counts.
    """
    found: dict[str, str] = {}
    words = [*_words(script), *more]
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        name, given, value = word.partition("=")
        if not name.startswith("--") and name[:2] in _LONG:
            name, given, value = _LONG[name[:2]], word[2:], word[2:].removeprefix("=")
        if name.startswith("--"):
            found.pop(name, None)
            found[name] = value if given or after.startswith("-") or name in _WITHOUT_VALUE else after
    return found


def _words(script: str) -> Iterator[str]:
    """The words of the ``#SBATCH`` lines, which end at the first line of the program."""
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            try:
                yield from shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                yield from line.split()[1:]
        elif line.strip() and not line.lstrip().startswith("#"):
            return


def _of_options(found: Mapping[str, str]) -> Asked:
    requeue = [name == "--requeue" for name in found if name in ("--requeue", "--no-requeue")]
    return Asked(
        no_kill=found["--no-kill"].lower() != "off" if "--no-kill" in found else None,
        requeue=requeue[-1] if requeue else None,
        signal=found.get("--signal"),
        open_mode=found.get("--open-mode"),
        nodes=found.get("--nodes", ""),
        tasks_per_node="--ntasks-per-node" in found,
    )
