"""Tasks as arrays of Slurm: within MaxArraySize, on other nodes after a failure, and never twice at once."""

from __future__ import annotations

import random
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opsd.data.array import Arrays, arrays_of
from opsd.data.pipeline import Stage
from opsd.data.records import Attempt, StageFolder
from opsd.data.run import Tries
from opsd.slurm.port import Job, Node, SlurmRejected, SlurmUnavailable
from tests.fakes.clock import FakeClock
from tests.fakes.slurm import FakeSlurm

NODES = ["n1", "n2", "n3", "n4"]
Fate = Callable[[int, int, str], str]
"""From a task, the number of its attempt and its node to how that ends: done, failed, wrong, lost, or "" if it runs on.

What is wrong fails with an error that lasts.
"""


class Queue(FakeSlurm):
    """A queue that starts the jobs of arrays when it is asked, and ends some of those that run."""

    def __init__(self, folder: StageFolder, fate: Fate, clock: FakeClock, most: int = 1001, room: int = 10_000) -> None:
        super().__init__([Node(name, "idle") for name in NODES])
        self.folder, self.fate, self.clock, self.most, self.room = folder, fate, clock, most, room
        self.arrays: list[dict[str, str]] = []
        self.waiting: dict[int, tuple[str, list[int], list[str]]] = {}
        self.running: dict[int, tuple[str, list[int], Attempt]] = {}
        self.tries: Counter[int] = Counter()
        self.at_once: Counter[int] = Counter()
        self.ids = 100

    def configuration(self) -> Mapping[str, str]:
        return {"MaxArraySize": str(self.most)}

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        self._answer()
        told = dict(option.removeprefix("--").partition("=")[::2] for option in options)
        last = int(re.fullmatch(r"0-(\d+)", told["array"])[1])  # type: ignore[index]
        assert last < self.most, "sbatch refuses an index of MaxArraySize and more"
        if len(self.waiting) + len(self.running) + last + 1 > self.room:
            raise SlurmRejected("sbatch: Job violates accounting/QOS policy (job submit limit)")
        self.arrays.append(told)
        *_, number, token = shlex.split(script.splitlines()[1])
        assert int(number) == self.folder.number
        (array,) = (each for each in arrays_of(self.folder) if each.token == token)
        assert array.jobs == last + 1
        nodes = [name for name in NODES if name not in told.get("exclude", "").split(",")]
        for index in range(array.jobs):
            self.waiting[self.ids] = (array.name, list(array.of_job(index)), nodes)
            self.ids += 1
        return self.ids

    def jobs(self, ids: Sequence[int] = (), *, node: str = "") -> Sequence[Job]:
        self._answer()
        self.turn()
        found = [(number, "pending", name) for number, (name, _, _) in self.waiting.items()]
        found += [(number, "running", name) for number, (name, _, _) in self.running.items()]
        return [Job(number, state, "", "u", "p", (), "", None, None, None, 0, name) for number, state, name in found]

    def turn(self) -> None:
        """Start everything that waits; then let each running job do one task, or die."""
        for number, (name, ranks, nodes) in list(self.waiting.items()):
            del self.waiting[number]
            self.start(number, name, ranks, nodes[self.ids % len(nodes)])
        for number, (name, ranks, attempt) in list(self.running.items()):
            end = self.fate(ranks[0], self.tries[ranks[0]], attempt.host)
            if not end:
                continue
            del self.running[number]
            self.at_once[ranks[0]] -= 1
            if end == "done":
                self.folder.record(ranks[0]).write_text("{}")
            if end == "unbegun":
                (self.folder.folder / f"attempts/{ranks[0]:05d}.{attempt.token}.json").unlink()
            if end in ("done", "failed", "wrong"):
                why, error = ("", "") if end == "done" else ("so it is", "TypeError" if end == "wrong" else "")
                self.folder.note(replace(attempt, outcome="done" if end == "done" else "failed", why=why, error=error))
                if ranks[1:]:
                    self.start(number, name, ranks[1:], attempt.host)

    def start(self, number: int, name: str, ranks: list[int], host: str) -> None:
        self.tries[ranks[0]] += 1
        self.at_once[ranks[0]] += 1
        assert self.at_once[ranks[0]] == 1, "a task runs twice at once"
        attempt = Attempt(ranks[0], host=host, job=number, array=name[10:], began=self.clock.wall())
        self.folder.note(attempt)
        self.running[number] = (name, ranks, attempt)


def play(
    tmp_path: Path, tasks: int, fate: Fate, *, per_job: int = 1, most: int = 1001, room: int = 10_000, **options: Any
) -> tuple[Queue, list[Attempt], StageFolder]:
    folder = StageFolder(tmp_path, 1)
    folder.make()
    clock = FakeClock()
    queue = Queue(folder, fate, clock, most, room)
    arrays = Arrays(
        tmp_path,
        queue,
        lambda _: None,
        per_job=per_job,
        opsd=("opsd",),
        sleep=clock.advance,
        clock=clock.wall,
        **options,
    )
    executor = SimpleNamespace(world_size=tasks, pipeline=[])
    tries = Tries()
    arrays.run(Stage(1, executor), folder, range(tasks), tries)
    return queue, [attempt for each in tries.tried.values() for attempt in each], folder


def test_three_thousand_tasks_fit_into_arrays(tmp_path: Path) -> None:
    """With MaxArraySize=1001 an index is 1000 at most."""
    queue, _, folder = play(tmp_path, 3000, lambda *_: "done")
    assert [told["array"] for told in queue.arrays] == ["0-1000", "0-1000", "0-997"]
    assert folder.finished() == set(range(3000))
    assert set(queue.tries.values()) == {1}


def test_a_task_that_failed_is_tried_elsewhere(tmp_path: Path) -> None:
    """Three times at most; the others are done all the same."""
    queue, told, folder = play(tmp_path, 20, lambda rank, number, node: "failed" if rank == 7 else "done")
    assert folder.finished() == set(range(20)) - {7}
    assert queue.tries[7] == 4
    assert [attempt.why for attempt in told] == ["so it is"] * 4
    hosts = [attempt.host for attempt in told]
    assert all(told["exclude"] == host for told, host in zip(queue.arrays[1:], hosts, strict=False))


def test_the_same_error_on_two_nodes_ends_a_task(tmp_path: Path) -> None:
    """On one of them only it does not."""
    queue, told, folder = play(
        tmp_path, 9, lambda rank, number, node: "wrong" if rank == 7 or (rank == 2 and number == 1) else "done"
    )
    assert folder.finished() == set(range(9)) - {7}
    assert (queue.tries[7], queue.tries[2], len(told)) == (2, 2, 3)


def test_what_was_lost_is_tried_again(tmp_path: Path) -> None:
    """Preempted, killed, or with its node: also the tasks that the same job would have run next."""
    _, told, folder = play(
        tmp_path, 40, lambda rank, number, node: "lost" if rank % 5 == 0 and number < 4 else "done", per_job=4
    )
    assert folder.finished() == set(range(40))
    assert {attempt.rank for attempt in told} == {rank for rank in range(40) if rank % 5 == 0}


def test_a_task_that_is_lost_for_ever_is_given_up(tmp_path: Path) -> None:
    """After eleven attempts."""
    queue, _, folder = play(tmp_path, 3, lambda rank, number, node: "lost" if rank == 1 else "done")
    assert (folder.finished(), queue.tries[1]) == ({0, 2}, 11)


def test_jobs_that_end_before_they_begin_are_told(tmp_path: Path) -> None:
    """A node without opsd, for instance; such jobs are not submitted for ever."""
    queue, told, folder = play(tmp_path, 3, lambda rank, number, node: "unbegun" if rank == 1 else "done")
    assert (folder.finished(), queue.tries[1]) == ({0, 2}, 11)
    assert {attempt.why.partition(";")[0] for attempt in told} == {"its job ended before the task began"}


def test_a_slurm_that_takes_few_jobs_gets_them_as_it_has_room(tmp_path: Path) -> None:
    """One that takes none at all is told."""
    _, _, folder = play(tmp_path, 90, lambda *_: "done", most=20, room=50)
    assert folder.finished() == set(range(90))
    with pytest.raises(SlurmRejected):
        play(tmp_path / "none", 90, lambda *_: "done", most=20, room=5)


@pytest.mark.parametrize("seed", range(8))
def test_commands_that_die_never_run_a_task_twice_at_once(tmp_path: Path, seed: int) -> None:
    """Killed at any poll and repeated, with tasks that fail, are lost and take their time, and a silent controller."""
    rng, clock, folder = random.Random(seed), FakeClock(), StageFolder(tmp_path, 1)
    folder.make()

    def fate(rank: int, number: int, node: str) -> str:
        return rng.choice(["", "", "done", "done"] if number > 2 else ["", "failed", "lost", "done"])

    queue = Queue(folder, fate, clock, most=8)
    stage = Stage(1, SimpleNamespace(world_size=30, pipeline=[]))

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        queue.error = SlurmUnavailable("no answer") if rng.random() < 0.2 else None
        if rng.random() < 0.2:
            raise KeyboardInterrupt

    for _ in range(400):
        arrays = Arrays(tmp_path, queue, lambda _: None, per_job=2, opsd=("opsd",), sleep=sleep, clock=clock.wall)
        try:
            arrays.run(stage, folder, range(30), Tries(99))
        except (KeyboardInterrupt, SlurmUnavailable):
            queue.error = None
            continue
        break
    assert folder.finished() == set(range(30))
