"""Running a pipeline: stage after stage, each with the tasks that are not done."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from opsd import durable
from opsd.data import checks
from opsd.data.pipeline import PipelineError, Stage
from opsd.data.records import (
    DONE,
    PLAN,
    RUN,
    Attempt,
    Done,
    StageFolder,
    Written,
    damage,
    plan_digest,
    publish,
    read_json,
    waiting_room,
    write_json,
)
from opsd.words import duration, plural

LOCK: Final = "lock"
RETRIES: Final = 3
"""How often a task that failed is tried again."""
LOSSES: Final = 10
"""How often a task is tried again that was preempted or killed, or whose node was lost."""

Say = Callable[[str], object]


class Engine(Protocol):
    """Where tasks run."""

    def run(self, stage: Stage, folder: StageFolder, ranks: Sequence[int], tell: Callable[[Attempt], object]) -> None:
        """Return once each task is done or was given up; ``tell`` gets each attempt that has ended. Raises OSError."""


@dataclass(slots=True)
class Tries:
    """The attempts at tasks since the command began, and whether there may be another one."""

    retries: int = RETRIES
    tried: dict[int, list[Attempt]] = field(default_factory=dict)

    def ended(self, attempt: Attempt) -> bool:
        """Note an attempt that has not done its task; whether it may be tried again. One without outcome was lost."""
        self.tried.setdefault(attempt.rank, []).append(attempt)
        return self.may(attempt.rank)

    def may(self, rank: int) -> bool:
        """Whether the task may be tried again."""
        failed = [bool(attempt.outcome) for attempt in self.tried.get(rank, ())]
        return sum(failed) <= self.retries and len(failed) - sum(failed) <= LOSSES

    def last(self, rank: int) -> Attempt | None:
        """The newest one at this task that was not successful."""
        return max(self.tried.get(rank, ()), key=lambda attempt: attempt.began, default=None)


@contextmanager
def held(root: Path) -> Iterator[None]:
    """Keep other runs of the pipeline out of ``root``. Raises PipelineError, OSError."""
    durable.make_folder(root)
    with open(root / LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(f"another `opsd data run` works in {root}: wait for it") from None
        yield


@dataclass
class Run:
    """One call of the command for the pipeline in ``file``, whose state is in ``root``. Raises PipelineError."""

    file: Path
    root: Path
    stages: Sequence[Stage]
    engine: Engine
    say: Say
    redo: bool = False
    allow_copies: bool = False

    def __post_init__(self) -> None:
        self._written: dict[Path, Written] = {}
        self._given: dict[str, int] = {}
        for stage in self.stages:
            if str(self.root.absolute()) in (*stage.outputs, *stage.inputs):
                raise PipelineError(
                    f"{self.root} is a folder of stage {stage.number}: choose another --dir for the state"
                )

    def run(self) -> bool:
        """Run all stages; False if a task was given up. Raises PipelineError, OSError."""
        here = {"pipeline": str(self.file.absolute()), "cwd": str(Path.cwd())}
        durable.make_folder(self.root)
        before = read_json(self.root / RUN)
        if before is None or self.redo:
            write_json(self.root / RUN, here)
        elif before != here:
            raise PipelineError(
                f"{self.root} is of {before['pipeline']}, run in {before['cwd']}: run it there, or choose another --dir"
            )
        return all(self._run_stage(stage) for stage in self.stages)

    def _run_stage(self, stage: Stage) -> bool:
        folder = StageFolder(self.root, stage.number)
        folder.make()
        checks.demand_inputs(stage, self._known(stage), self.allow_copies)
        plan = checks.make_plan(stage, self._known(stage))
        self._compare(stage, folder, plan)
        records = self._kept(stage, folder)
        checks.demand_outputs(stage, self._known(stage))
        if folder.plan is None:
            write_json(folder.folder / PLAN, plan)
        left = sorted(set(range(stage.tasks)) - {done.rank for done in records})
        if left:
            self.say(_begins(stage, len(left), len(self.stages)))
            self.engine.run(stage, folder, left, self._tell)
            records = folder.records()
            if missing := sorted(set(range(stage.tasks)) - {done.rank for done in records}):
                self.say(f"stage {stage.number}: {plural(len(missing), 'task')} not done: {_why(folder, missing)}")
                return False
        self._finish(stage, folder, plan, records)
        return True

    def _known(self, stage: Stage) -> checks.Known:
        later = (StageFolder(self.root, other.number) for other in self.stages if other.number >= stage.number)
        paths = (file.path for folder in later for done in folder.records() for file in done.files)
        return checks.Known(self._written, frozenset(paths))

    def _compare(self, stage: Stage, folder: StageFolder, plan: dict[str, Any]) -> None:
        """Refuse a stage that was begun with something else, or begin it again. Raises PipelineError, OSError."""
        before = folder.plan
        if before is None or not (changed := checks.changes(before, plan)):
            return
        told = f"stage {stage.number} was begun with something else: {'; '.join(changed)}"
        if not self.redo:
            raise PipelineError(
                f"{told}. Undo that, or pass --redo to run this stage and those that depend on it again"
            )
        self.say(f"{told}; it runs again")
        folder.forget()

    def _kept(self, stage: Stage, folder: StageFolder) -> list[Done]:
        """The records of this plan whose files are as they were written. Raises PipelineError, OSError."""
        if stale := _stale(folder, records := folder.records()):
            folder.forget(stale)
            records = [done for done in records if done.rank not in stale]
        for done in records:
            publish(done)
        bad = {done.rank: why for done in records for file in done.files if (why := damage(file))}
        if not bad:
            return records
        told = "; ".join(checks.shortened(list(bad.values())))
        if not self.redo:
            raise PipelineError(f"stage {stage.number}: {told}. Put it back, or pass --redo to run those tasks again")
        self.say(f"stage {stage.number}: {told}; {plural(len(bad), 'task')} will run again")
        folder.forget(sorted(bad))
        return [done for done in records if done.rank not in bad]

    def _finish(self, stage: Stage, folder: StageFolder, plan: dict[str, Any], records: Sequence[Done]) -> None:
        """Check the stage as a whole. Raises PipelineError, OSError."""
        if stale := _stale(folder, records):
            raise PipelineError(
                f"stage {stage.number}: an attempt of before has finished task {stale[0]}: run the same command again"
            )
        for done in records:
            publish(done)
        made = checks.summary(stage, plan, records)
        problems = [why for done in records for file in done.files if (why := damage(file))]
        if problems:
            raise PipelineError(f"stage {stage.number}: {'; '.join(checks.shortened(problems))}")
        checks.demand_outputs(stage, self._known(stage))
        checks.demand_hand_over(stage, made, self._given)
        self._written |= {file.path: file for done in records for file in done.files}
        for place, count in made["given"].items():
            self._given[place] = self._given.get(place, 0) + count
        for place in stage.outputs:
            shutil.rmtree(waiting_room(place), ignore_errors=True)
        if folder.done != made:
            write_json(folder.folder / DONE, made)

    def _tell(self, attempt: Attempt) -> None:
        self.say(f"task {attempt.rank} on {attempt.host} {told(attempt)}")


def _stale(folder: StageFolder, records: Sequence[Done]) -> list[int]:
    """The tasks that an attempt has finished which was begun before the stage was begun again."""
    plan = plan_digest(folder.plan or {})
    return [done.rank for done in records if done.plan != plan]


def told(attempt: Attempt) -> str:
    """How an attempt that was not successful ended."""
    if attempt.outcome:
        return f"failed: {attempt.why}"
    return f"was lost after {duration(attempt.seconds)}: {attempt.why or 'preempted or killed, or its node was lost'}"


def _begins(stage: Stage, left: int, stages: int) -> str:
    done = f", {stage.tasks - left:,} are done" if left < stage.tasks else ""
    return f"stage {stage.number} of {stages}: {stage.name}: {plural(left, 'task')}{done}"


def _why(folder: StageFolder, ranks: Sequence[int]) -> str:
    tried = [attempt for attempt in folder.attempts() if attempt.rank in set(ranks)]
    last = {attempt.rank: attempt for attempt in tried}
    return "; ".join(checks.shortened([f"task {rank} {told(attempt)}" for rank, attempt in sorted(last.items())]))


def cores() -> int:
    """Of this machine, as far as this process may use them."""
    return len(os.sched_getaffinity(0))
