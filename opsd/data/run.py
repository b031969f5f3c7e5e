"""Running a pipeline: stage after stage, each with the tasks that are not done."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from opsd import durable
from opsd.data import checks
from opsd.data.identity import digest_of
from opsd.data.pipeline import PipelineError, Stage
from opsd.data.records import (
    ARRAYS,
    DONE,
    PLAN,
    RUN,
    TASKS,
    Attempt,
    Done,
    StageFolder,
    Written,
    damage,
    publish,
    read_json,
    waiting_room,
    write_json,
)
from opsd.exitcodes import is_full
from opsd.words import duration, plural

LOCK: Final = "lock"
RETRIES: Final = 3
"""How often a task that failed is tried again."""
_PAUSES_S: Final = (1.0, 5.0, 25.0)
_TOLD: Final = 5
"""How many attempts with the same error are told."""
LOSSES: Final = 10
"""How often a task is tried again that was preempted or short of memory, or whose node was lost."""

Say = Callable[[str], object]


class Engine(Protocol):
    """Where tasks run."""

    def run(self, stage: Stage, folder: StageFolder, ranks: Sequence[int], tries: Tries) -> None:
        """Return once each task is done or was given up; ``tries`` gets attempts that were not successful.

        Raises OSError.
        """


@dataclass(slots=True)
class Tries:
    """The attempts at tasks of a stage since the command began, and whether there may be another one.

    Each that was not successful is told, but of those with the same error only the first ones.
    """

    retries: int = RETRIES
    say: Say = lambda _: None
    tried: dict[int, list[Attempt]] = field(default_factory=dict)
    _same: Counter[str] = field(default_factory=Counter)

    def ended(self, attempt: Attempt) -> bool:
        """Note an attempt that has not done its task; whether it may be tried again. One without outcome was lost."""
        self.tried.setdefault(attempt.rank, []).append(attempt)
        self._same[attempt.error] += 1
        if not attempt.error or self._same[attempt.error] <= _TOLD:
            self.say(f"task {attempt.rank} on {attempt.host} {told(attempt)}")
            if attempt.error and self._same[attempt.error] == _TOLD:
                self.say("tasks that fail like this are not told any more")
        return self.may(attempt.rank)

    def may(self, rank: int) -> bool:
        """Whether the task may be tried again."""
        failed = [bool(attempt.outcome) for attempt in self.tried.get(rank, ())]
        return sum(failed) <= self.retries and len(failed) - sum(failed) <= LOSSES and not self.fails_again(rank)

    def pause(self, rank: int) -> float:
        """Seconds until the task may be tried again; longer each time after what may pass."""
        tried = self.tried[rank]
        if not tried[-1].outcome or tried[-1].error:
            return 0.0
        return _PAUSES_S[min(sum(bool(attempt.outcome) for attempt in tried), len(_PAUSES_S)) - 1]

    def fails_again(self, rank: int) -> bool:
        """Whether the task has failed twice in a row with the same error."""
        *_, one, other = ["", "", *(attempt.error for attempt in self.tried.get(rank, ()) if attempt.outcome)]
        return one == other != ""

    def last(self, rank: int) -> Attempt | None:
        """The newest one at this task that was not successful."""
        return max(self.tried.get(rank, ()), key=lambda attempt: attempt.began, default=None)


@contextmanager
def held(folder: Path, place: object = None) -> Iterator[None]:
    """Keep other runs out of ``folder``, which stands for ``place``. Raises PipelineError, OSError."""
    while True:
        durable.make_folder(folder)
        with open(folder / LOCK, "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PipelineError(f"another `opsd data run` works in {place or folder}: wait for it") from None
            if durable.is_named(folder / LOCK, lock.fileno()):  # otherwise its holder has just removed it
                yield
                return


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
    retries: int = RETRIES
    full: bool = field(default=False, init=False)
    """Whether a task was given up because a disk or a quota is full."""

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
        checks.demand_one_file_system(stage)
        left = sorted(set(range(stage.tasks)) - {done.rank for done in records})
        with ExitStack() as locks:
            for room, place in {waiting_room(place): place for place in stage.outputs if left}.items():
                locks.enter_context(held(room, place))
            checks.demand_outputs(stage, self._known(stage))
            if folder.plan is None:
                write_json(folder.folder / PLAN, plan)
            if left and not self._run_tasks(stage, folder, left):
                return False
            self._finish(stage, folder, plan, folder.records() if left else records)
        return True

    def _run_tasks(self, stage: Stage, folder: StageFolder, left: Sequence[int]) -> bool:
        """False if one was given up. Raises PipelineError, OSError."""
        self.say(_begins(stage, len(left), len(self.stages)))
        tries = Tries(self.retries, self.say)
        self.engine.run(stage, folder, left, tries)
        missing = sorted(set(left) - folder.finished())
        last = [attempt for rank in missing if (attempt := tries.last(rank)) is not None]
        self.full = any(is_full(attempt.errno) for attempt in last)
        if missing:
            self.say(f"stage {stage.number}: {plural(len(missing), 'task')} not done: {_why(last, tries)}")
        return not missing

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
        made = checks.summary(stage, plan, checks.make_plan(stage, self._known(stage)), records)
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
        for part in (TASKS, ARRAYS):
            durable.remove_forgotten(folder.folder / part)
        if folder.done != made:
            write_json(folder.folder / DONE, made)


def _stale(folder: StageFolder, records: Sequence[Done]) -> list[int]:
    """The tasks that an attempt has finished which was begun before the stage was begun again."""
    plan = digest_of(folder.plan or {})
    return [done.rank for done in records if done.plan != plan]


def told(attempt: Attempt) -> str:
    """How an attempt that was not successful ended."""
    if attempt.outcome:
        return f"failed: {attempt.why}"
    return f"was lost after {duration(attempt.seconds)}: {attempt.why or 'preempted or killed, or its node was lost'}"


def _begins(stage: Stage, left: int, stages: int) -> str:
    done = f", {stage.tasks - left:,} are done" if left < stage.tasks else ""
    return f"stage {stage.number} of {stages}: {stage.name}: {plural(left, 'task')}{done}"


def _why(last: Sequence[Attempt], tries: Tries) -> str:
    twice = " (twice in a row, so it was not tried again)"
    reasons = [f"task {each.rank} {told(each)}{twice if tries.fails_again(each.rank) else ''}" for each in last]
    return "; ".join(checks.shortened(reasons))


def cores() -> int:
    """Of this machine, as far as this process may use them."""
    return len(os.sched_getaffinity(0))
