"""Requests for spares when a run has lost a node: one job per node, whose launcher joins the run.

A process on each node of the run reads the run's events. The one on the leader's node acts at once, the others a little
later and only if it has not: the node that creates the file of a loss submits the job.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opsd.files import FileTail
from opsd.slurm.allocation import Allocation
from opsd.slurm.candidates import lemons_to_spare
from opsd.slurm.port import Slurm, SlurmError, SlurmRejected, SlurmUnavailable
from opsd.slurm.requeue import is_alive
from opsd.slurm.run_outcome import EVENTS

FOLDER = "spares"
"""In the run's folder: one file per requested spare."""
DEFER_S = 3.0
"""How long the other nodes leave a loss to the leader's node."""
RETRY_S = 2.0
NOTICE_S = 300
"""Seconds before the end of its own job at which a borrowed node requests a successor and leaves."""
_ENDS_AS_EARLY_MIN = 1


@dataclass(frozen=True, slots=True)
class Loss:
    """A request for a spare, reported by the launcher on the node ``leader``; ``key`` is the same for all readers."""

    key: str
    leader: str


@dataclass(frozen=True, slots=True)
class SpareJob:
    """What a spare runs: ``launch`` are options of ``opsd launch`` except the nodes, ``pool`` those of sbatch."""

    pool: tuple[str, ...]
    opsd: tuple[str, ...]
    launch: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    def job(self, job: Allocation, refused: Sequence[str], left_min: int | None, log: str) -> tuple[str, list[str]]:
        """The script and options of the job: a launcher that takes the run's job for its own, on its own node."""
        nodes = ",".join(job.nodes)
        ours = {
            "SLURM_JOB_ID": str(job.job), "SLURM_JOB_NODELIST": nodes, "SLURM_RESTART_COUNT": str(job.restarts),
            **self.environ,
        }  # fmt: skip
        told = " ".join(f"{name}={shlex.quote(value)}" for name, value in ours.items())
        command = shlex.join([*self.opsd, "launch", "--nodes"]), shlex.join(self.launch)
        script = (
            f"#!/bin/bash\n{output_to(log)}"
            "node=$SLURMD_NODENAME conf=${SLURM_CONF-}\n"
            'for name in "${!SLURM_@}" LC_ALL; do unset "$name"; done\n'
            '[ -z "$conf" ] || export SLURM_CONF="$conf"\n'
            f'exec env SLURMD_NODENAME="$node" {told} {command[0]} {shlex.quote(nodes)},"$node" {command[1]}\n'
        )
        options = [
            *self.pool, "--nodes=1", "--ntasks=1", "--exclusive", "--no-requeue", "--job-name=opsd-spare",
            f"--signal=B:USR1@{NOTICE_S}", "--output=/dev/null",
            *([f"--exclude={','.join(refused)}"] if refused else []),
            *([f"--time={left_min}"] if left_min is not None else []),
        ]  # fmt: skip
        return script, options


def output_to(log: str) -> str:
    """The lines of a batch script that append its output to ``log``, a word of the shell, where that can be written.

    A job whose ``--output`` is on a full disk fails as it starts.
    """
    return f"(: >>{log}) 2>/dev/null && exec >>{log} 2>&1\n"


def wants_spare(record: Mapping[str, Any]) -> bool:
    """Whether this event of the run is a reason to fetch a node from the pool."""
    event = record.get("event")
    return event in ("spare_refused", "spare_wanted") or (event == "node_lost" and bool(record.get("ranks")))


class SpareRequester:
    """Requests spares from one node, while the run's job goes on."""

    def __init__(
        self,
        folder: Path,
        node: str,
        job: Allocation,
        spare: SpareJob,
        slurm: Callable[[], Slurm],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        say: Callable[[str], object] = print,
    ) -> None:
        self._folder, self._node, self._job, self._spare = folder, node, job, spare
        self._slurm, self._clock, self._wall, self._say = slurm, clock, wall, say
        self._events = FileTail(folder / EVENTS, at_end=True)
        self._refused: list[str] = []
        self._due: dict[str, float] = {}

    def look(self) -> None:
        """Read new events and submit the spare jobs that are due."""
        now = self._clock()
        for loss in self._losses():
            self._due[loss.key] = now if loss.leader == self._node else now + DEFER_S
        for key in [key for key, due in self._due.items() if due <= now]:
            self._due.pop(key)
            with suppress(FileExistsError):
                self._ask(key)

    def _losses(self) -> Iterator[Loss]:
        for record in self._events.records():
            event = record.get("event")
            if event == "spare_refused" and (name := str(record.get("refused", ""))) not in self._refused:
                self._refused.append(name)
            if wants_spare(record):
                yield Loss(_key(record), str(record.get("node", "")))

    def _ask(self, key: str) -> None:
        """Submit a job for the loss ``key``. Raises FileExistsError if another node has done so."""
        path = self._folder / FOLDER / f"{key}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise
        except OSError as error:
            self._say(f"no spare is requested: {path} cannot be created: {error.strerror}")
            return
        os.close(descriptor)
        try:
            asked = self._submit()
        except SlurmUnavailable as error:
            self._say(f"Slurm does not answer; the request for a spare will be repeated: {error}")
            self._due[key] = self._clock() + RETRY_S
            path.unlink(missing_ok=True)
            return
        except SlurmError as error:
            self._say(f"no spare is available: {error}")
            asked = None
        told = {"job": asked, "for": self._job.job, "restarts": self._job.restarts, "by": self._node}
        with suppress(OSError):  # on a full disk the job stays in the queue if it is not needed in the end
            path.write_text(json.dumps(told), encoding="utf-8")

    def _submit(self) -> int | None:
        """The job id, None if the run's own job is ending: then no spare is needed."""
        slurm = self._slurm()
        found = slurm.jobs([self._job.job])
        if not found or not is_alive(found[0]) or found[0].restarts != self._job.restarts:
            return None
        ends = found[0].ends_at
        left = int((ends - self._wall()) / 60) if ends is not None else None
        if left is not None and left < _ENDS_AS_EARLY_MIN:
            return None
        log = f"{shlex.quote(str(self._folder / 'spare-'))}$SLURM_JOB_ID.log"
        without = [*self._refused, *self._lemons(slurm)]
        try:
            asked = slurm.submit(*self._spare.job(self._job, without, left, log))
        except SlurmRejected:
            if left is None:
                raise
            # The pool may allow less time than the job has: its launcher requests a successor and leaves in time.
            asked = slurm.submit(*self._spare.job(self._job, without, None, log))
        self._say(f"job {asked} will add a spare to the run")
        return asked

    def _lemons(self, slurm: Slurm) -> list[str]:
        """Nodes of the pool that are taken last; none where Slurm does not tell, as a spare must not wait for that."""
        with suppress(SlurmError):
            pool = _pool(slurm, self._spare.pool)
            return lemons_to_spare(slurm.nodes(), slurm.comments(), pool, self._refused, self._wall())
        return []


def _pool(slurm: Slurm, options: Sequence[str]) -> frozenset[str]:
    """The nodes of the reservation, or else the partition, in these options of sbatch. Raises SlurmError."""
    told = dict(option.removeprefix("--").partition("=")[::2] for option in options)
    if name := told.get("reservation"):
        return frozenset(node for found in slurm.reservations() if found.name == name for node in found.nodes)
    name = told.get("partition")
    return frozenset(node for found in slurm.partitions() if found.name == name for node in found.nodes)


def cancel_spares(slurm: Slurm, folder: Path, job: Allocation, say: Callable[[str], object] = print) -> None:
    """Cancel the spare jobs that ``job`` requested and that are still pending. Raises SlurmError."""
    asked = []
    for path in (folder / FOLDER).glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads(path.read_bytes())
            if (raw["for"], raw["restarts"]) == (job.job, job.restarts) and raw["job"] is not None:
                asked.append(int(raw["job"]))
    for found in slurm.jobs(asked) if asked else ():
        if found.state == "pending":
            slurm.cancel(found.id)
            say(f"job {found.id}, for a spare, is no longer needed")


def _key(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
