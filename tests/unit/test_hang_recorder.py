"""Flight recorders in a hang: what the launcher keeps of them, and what they say about its verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from opsd.collectors.lib.nccl.desync import BETWEEN, MISMATCHED, NEVER_CALLED, NO_DUMP, Desync
from opsd.launch.hangs.culprit import CERTAIN, Hang, RankStatus
from opsd.launch.hangs.recorder import RecorderJudge, dump_path, judge_folder, with_verdict
from opsd.launch.io.loop import Callback, Timer

T = TypeVar("T")


class Held:
    """A loop whose timers and threads are called back by the test."""

    def __init__(self) -> None:
        self.timers: list[Callback] = []
        self.threads: list[Callback] = []

    def time(self) -> float:
        return time.monotonic()

    def later(self, delay_s: float, callback: Callback) -> Timer:
        self.timers.append(callback)
        return Timer(delay_s, callback)

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T | OSError], None], *, key: str = "") -> bool:
        self.threads.append(lambda: done(work()))
        return True


def status(rank: int, process: str = "S") -> RankStatus:
    return RankStatus(rank, "forward", "forward", 7, 100.0, 60.0, 60.0, process)


def hang(rank: int | None, score: int = 10) -> Hang:
    return Hang(rank, "forward", 7, 60.0, 60.0, "why", ("a sentence",), tuple(map(status, range(4))), score)


def verdict(cause: str, *culprits: int, confidence: float = 0.9) -> Desync:
    return Desync(cause, culprits, confidence, "0", "default_pg", 4, "all_reduce", culprits, (), (), (0, 1))


def test_recorders_name_the_rank_if_nobody_stands_out() -> None:
    """Stacks and pages look alike; one rank has not called what the others wait in."""
    found = with_verdict(hang(None, 0), verdict(NEVER_CALLED, 3))
    assert found.rank == 3
    assert found.reason == "rank 3: never called all_reduce 4 of group 0"
    assert "flight recorder: rank 3 did not call it" in found.evidence
    assert found.score == CERTAIN, "more than elapsed time speaks for it: limits stay"


def test_recorders_correct_what_elapsed_time_suggests() -> None:
    """A rank that called something else is the culprit, not the one that stopped first."""
    assert with_verdict(hang(0, 5), verdict(MISMATCHED, 2, confidence=0.85)).rank == 2


def test_a_stopped_process_stays_the_culprit() -> None:
    """What the kernel says of a process is certain; the recorders are added."""
    found = with_verdict(hang(1, 2 * CERTAIN), verdict(NEVER_CALLED, 3))
    assert found.rank == 1
    assert len(found.evidence) > 1


@pytest.mark.parametrize(
    "said", [verdict(BETWEEN), verdict(NO_DUMP, 3, confidence=0.3), verdict(BETWEEN, 3, confidence=0.9)]
)
def test_thin_evidence_names_nobody(said: Desync) -> None:
    """If all have come, or most dumps are missing, the verdict of stacks and pages stays."""
    assert with_verdict(hang(1), said).rank == 1
    assert with_verdict(hang(None), said).rank is None


def test_without_recorders_nothing_changes() -> None:
    """Programs without torch have none."""
    assert with_verdict(hang(1), None) == hang(1)


def dump(folder: Path, rank: int, calls: int, generation: int) -> None:
    """The dump of a rank on gloo that has made so many calls."""
    entries = [
        {
            "record_id": number, "process_group": ["0", "default_pg"], "collective_seq_id": number + 1,
            "p2p_seq_id": 0, "profiling_name": "gloo:all_reduce", "state": "scheduled", "is_p2p": False,
            "time_created_ns": 1_000 + number, "retired": False, "input_sizes": [[4]], "input_dtypes": ["Float"],
            "output_sizes": [[4]],
        }
        for number in range(calls)
    ]  # fmt: skip
    path = dump_path(folder, rank)
    path.parent.mkdir(exist_ok=True)
    content = {"entries": entries, "pg_config": {"0": {"name": "0", "desc": "d", "ranks": "[0, 1, 2]"}}}
    path.write_text(json.dumps(content | {"opsd_generation": generation}))


def test_dumps_of_this_generation_are_judged(tmp_path: Path) -> None:
    """The third rank lags one call behind."""
    for rank, calls in enumerate((5, 5, 4)):
        dump(tmp_path, rank, calls, generation=3)
    found = judge_folder(tmp_path, 3, 3)
    assert found is not None
    assert (found.cause, found.culprits) == (NEVER_CALLED, (2,))


def test_dumps_of_an_earlier_hang_are_not(tmp_path: Path) -> None:
    """A rank that cannot answer this time has left its dump of the time before."""
    for rank, calls in enumerate((5, 5, 4)):
        dump(tmp_path, rank, calls, generation=2 if rank == 2 else 3)
    found = judge_folder(tmp_path, 3, 3)
    assert found is not None
    assert found.no_dump == (2,)
    assert judge_folder(tmp_path, 4, 3) is None


def test_damaged_dumps_are_no_evidence(tmp_path: Path) -> None:
    """Half a file is as good as none."""
    dump_path(tmp_path, 0).parent.mkdir()
    dump_path(tmp_path, 0).write_bytes(b'{"entries": [{, "opsd_generation": 1}')
    assert judge_folder(tmp_path, 1, 2) is None


def test_each_hang_is_judged_once(tmp_path: Path) -> None:
    """By the dumps or, where they are not to be had in time, without; not while it is asked already."""
    loop, said = Held(), list[Desync | None]()
    judge = RecorderJudge(tmp_path, loop)
    for rank, calls in enumerate((5, 5, 4)):
        dump(tmp_path, rank, calls, generation=1)
    for number, first in enumerate((loop.threads, loop.timers), start=1):
        assert judge.judge(1, 3, alone=True, then=said.append)
        assert not judge.judge(1, 3, alone=True, then=said.append)
        first[-1]()
        loop.timers[-1]()
        loop.threads[-1]()
        assert len(said) == number
    assert said[0] is not None
    assert (said[0].culprits, said[1]) == ((2,), None)


def test_the_verdict_of_a_hang_that_is_over_is_of_no_other(tmp_path: Path) -> None:
    """It comes when the next generation hangs, and is asked about."""
    loop, said = Held(), list[str]()
    judge = RecorderJudge(tmp_path, loop)
    judge.judge(1, 1, alone=True, then=lambda _: said.append("first"))
    judge.forget()
    assert judge.judge(2, 1, alone=True, then=lambda _: said.append("second"))
    loop.threads[0]()
    assert said == []
    loop.threads[1]()
    assert said == ["second"]
