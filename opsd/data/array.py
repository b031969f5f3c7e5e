"""Tasks as job arrays of Slurm, each within MaxArraySize.

The jobs are never requeued by Slurm: the command notices which tasks have no job and no record, and submits them again
on other nodes. An array has a name of its own, so a command that was killed finds its jobs again.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from opsd import exitcodes
from opsd.data.local import Process
from opsd.data.pipeline import PipelineError, Stage
from opsd.data.records import ARRAYS, FAILED, LOG, SUCCESSFUL, Attempt, StageFolder, write_json
from opsd.data.run import Tries
from opsd.progress import shown
from opsd.slurm.port import ENDED, Job, Slurm, SlurmRejected, SlurmUnavailable
from opsd.slurm.requeue_helper import OPSD

POLL_S: Final = 2.0
MAX_ARRAY: Final = 1001
"""MaxArraySize of a Slurm that does not say."""
_PREFIX: Final = "opsd-data-"
_NEW_S: Final = 30.0
"""For so long after its submission, an array that Slurm does not show is taken for one that it does not show yet."""


@dataclass(frozen=True, slots=True)
class Array:
    """A submitted array: ``ranks`` in the order of its jobs, ``per_job`` of them in each."""

    token: str
    ranks: tuple[int, ...]
    per_job: int
    at: float

    @property
    def name(self) -> str:
        """The name of its jobs."""
        return f"{_PREFIX}{self.token}"

    @property
    def jobs(self) -> int:
        """Their number."""
        return -(-len(self.ranks) // self.per_job)

    def of_job(self, index: int) -> tuple[int, ...]:
        """The tasks of one of its jobs."""
        return self.ranks[index * self.per_job : (index + 1) * self.per_job]


@dataclass
class Arrays:
    """Runs tasks through ``slurm``. ``limit`` is how many jobs of an array run at once, 0 for no limit."""

    root: Path
    slurm: Slurm
    say: Callable[[str], object]
    partition: str = ""
    options: Sequence[str] = ()
    limit: int = 0
    per_job: int = 0
    opsd: Sequence[str] = ()
    sleep: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.time
    _said: set[str] = field(default_factory=set)

    def run(self, stage: Stage, folder: StageFolder, ranks: Sequence[int], tries: Tries) -> None:
        """See ``opsd.data.run.Engine``. Raises SlurmError if nothing can be submitted, OSError."""
        told = set[str]()
        began = self.clock()
        earlier = {attempt.token for attempt in folder.attempts() if attempt.began < began - _NEW_S}
        with shown(f"stage {stage.number}", "tasks") as look:
            while left := set(ranks) - folder.finished():
                look(len(ranks) - len(left), len(ranks))
                live = self._live()
                if live is not None:
                    attempts = [each for each in folder.attempts() if each.token not in earlier]
                    idle = left - self._busy(folder, attempts, live) - folder.finished()
                    for attempt in (*self._ended(attempts, live, idle), *self._unbegun(folder, attempts, idle, began)):
                        if attempt.token not in told:
                            told.add(attempt.token)
                            tries.ended(attempt)
                    self._submit(stage, folder, sorted(rank for rank in idle if tries.may(rank)), tries, live)
                    if all(not tries.may(rank) for rank in left):
                        return
                self.sleep(POLL_S)

    def _live(self) -> dict[str, list[Job]] | None:
        """Jobs that wait or run, by name; None while Slurm does not answer."""
        try:
            jobs = self.slurm.jobs()
        except SlurmUnavailable:
            return None
        found: dict[str, list[Job]] = {}
        for job in jobs:
            if job.name.startswith(_PREFIX) and job.state not in ENDED:
                found.setdefault(job.name, []).append(job)
        return found

    def _busy(self, folder: StageFolder, attempts: Sequence[Attempt], live: Mapping[str, list[Job]]) -> set[int]:
        """The tasks that wait in an array or run."""
        busy: set[int] = set()
        newest = {rank: array for array in arrays_of(folder) for rank in array.ranks}
        for array in {array.token: array for array in newest.values()}.values():
            jobs = live.get(array.name, ())
            own = [each for each in attempts if each.array == array.token]
            if not jobs:
                is_new = not own and self.clock() - array.at < _NEW_S
                busy |= {rank for rank in array.ranks if newest[rank] is array and is_new}
                continue
            running = {job.id for job in jobs}
            for index in range(array.jobs):
                members = array.of_job(index)
                tried = [each for each in own if each.rank in members]
                if not tried or any(each.job in running for each in tried):
                    failed = {each.rank for each in tried if each.outcome == FAILED}
                    busy |= {rank for rank in members if newest[rank] is array} - failed
        return busy

    @staticmethod
    def _ended(attempts: Sequence[Attempt], live: Mapping[str, list[Job]], idle: set[int]) -> Iterator[Attempt]:
        running = {job.id for jobs in live.values() for job in jobs}
        for attempt in attempts:
            if attempt.rank in idle and (attempt.outcome == FAILED or attempt.job not in running):
                yield attempt

    @staticmethod
    def _unbegun(folder: StageFolder, attempts: Sequence[Attempt], idle: set[int], began: float) -> Iterator[Attempt]:
        """Jobs of this call that ended before they began their task, as attempts that were lost."""
        begun = {(each.array, each.rank) for each in attempts}
        why = f"its job ended before the task began; its log is in {folder.folder / LOG}"
        for array in arrays_of(folder):
            for members in map(array.of_job, range(array.jobs) if array.at >= began else ()):
                if not any((array.token, rank) in begun for rank in members):
                    for rank in idle.intersection(members):
                        yield Attempt(
                            rank, f"{array.token}-{rank}", "a node", array=array.token, began=array.at,
                            seen=array.at, why=why,
                        )  # fmt: skip

    def _submit(
        self, stage: Stage, folder: StageFolder, ranks: Sequence[int], tries: Tries, live: Mapping[str, list[Job]]
    ) -> None:
        """Raises SlurmError if Slurm takes no array, and none is there."""
        per_job = self.per_job or int(getattr(stage.executor, "tasks_per_job", 1))
        for some in _parts(ranks, self._most() * per_job):
            array = Array(secrets.token_hex(6), tuple(some), per_job, self.clock())
            write_json(folder.folder / ARRAYS / f"{array.token}.json", [array.ranks, array.per_job, array.at])
            try:
                self.slurm.submit(self._script(folder, array), self._options(stage, folder, array, tries))
            except SlurmRejected as error:  # for instance more jobs than the user may have
                (folder.folder / ARRAYS / f"{array.token}.json").unlink()
                if not live and some[0] == ranks[0]:
                    raise
                self._say_once(f"the other tasks wait until Slurm takes them: {error}")
                return
            except SlurmUnavailable as error:  # it may have taken the array
                self._say_once(f"{error}; tasks that do not appear are submitted again")
                return

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.say(sentence)

    def _most(self) -> int:
        told = self.slurm.configuration().get("MaxArraySize", "")
        return int(told) if told.isdigit() and int(told) else MAX_ARRAY

    def _script(self, folder: StageFolder, array: Array) -> str:
        opsd = self.opsd or (shlex.split(os.environ["OPSD"]) if os.environ.get("OPSD") else OPSD)
        words = [*opsd, "data", "task", str(self.root.absolute()), str(folder.number), array.token]
        return f"#!/bin/bash\nexec {shlex.join(words)}\n"

    def _options(self, stage: Stage, folder: StageFolder, array: Array, tries: Tries) -> list[str]:
        executor = stage.executor
        limit = self.limit or max(0, int(getattr(executor, "workers", 0))) * hasattr(executor, "sbatch_args")
        asked = {
            "partition": self.partition or getattr(executor, "partition", ""),
            "time": getattr(executor, "time", ""), "qos": getattr(executor, "qos", ""),
            "cpus-per-task": getattr(executor, "cpus_per_task", 1),
            "mem-per-cpu": f"{executor.mem_per_cpu_gb}G" if hasattr(executor, "mem_per_cpu_gb") else "",
            "exclude": ",".join(self._avoided(array.ranks, tries)),
            **getattr(executor, "_sbatch_args", {}),
        }  # fmt: skip
        log = folder.folder.absolute() / LOG / "%A_%a.log"
        return [
            f"--job-name={array.name}", f"--array=0-{array.jobs - 1}{f'%{limit}' if limit else ''}", "--no-requeue",
            "--ntasks=1", f"--output={log}", *(f"--{name}={value}" for name, value in asked.items() if value),
            *self.options,
        ]  # fmt: skip

    def _avoided(self, ranks: Sequence[int], tries: Tries) -> list[str]:
        """The nodes on which these tasks were not successful last, unless that is most of the nodes."""
        last = [attempt for rank in ranks if (attempt := tries.last(rank)) is not None]
        hosts = {attempt.host for attempt in last}
        names = {node.name for node in self.slurm.nodes() if node.usable} if hosts else set()
        return sorted(hosts & names) if len(hosts & names) * 2 <= len(names) else []


def _parts(ranks: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(ranks), most):
        yield ranks[start : start + most]


def arrays_of(folder: StageFolder) -> list[Array]:
    """The arrays that were submitted for a stage, the oldest first."""
    found = []
    for path in (folder.folder / ARRAYS).glob("*.json"):
        with suppress(OSError, ValueError):
            ranks, per_job, at = json.loads(path.read_text(encoding="utf-8"))
            found.append(Array(path.stem, tuple(ranks), per_job, at))
    return sorted(found, key=lambda array: array.at)


def run_job(root: Path, stage: int, token: str, environ: Mapping[str, str]) -> int:
    """Run the tasks of this job of an array; returns its exit code. Raises PipelineError."""
    folder = StageFolder(root, stage)
    array = next((each for each in arrays_of(folder) if each.token == token), None)
    if array is None:
        raise PipelineError(f"{folder.folder / ARRAYS / token}.json is gone: was the stage begun again?")
    ranks = array.of_job(int(environ["SLURM_ARRAY_TASK_ID"]))
    job, cpus = int(environ.get("SLURM_JOB_ID", 0)), int(environ.get("SLURM_CPUS_PER_TASK") or 1)
    process, code = Process(root, stage, cpus), exitcodes.OK
    for number, rank in enumerate(ranks):
        if folder.record(rank).exists():
            continue
        if not process.lives:
            process = Process(root, stage, cpus)
        process.ask(Attempt(rank, job=job, array=token, cpus=cpus))
        try:
            if process.answer(folder).outcome not in SUCCESSFUL:
                code = exitcodes.FAILED
        except PipelineError as error:
            for each in ranks[number:]:
                folder.note(Attempt(each, job=job, array=token, outcome=FAILED, why=str(error), error=str(error)))
            raise
    process.end()
    return code
