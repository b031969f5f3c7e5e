"""What launchers tell of their ranks' steps, and what is made of it and kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.client import RING_STEPS
from opsd.launch.io.reporting import flush_all
from opsd.launch.ranks.step_log import StepLog
from opsd.launch.run.messages import CODEC, Progress, StepTimes
from opsd.launch.run.slow_ranks import (
    FOUND,
    GONE,
    GONE_S,
    PHASES,
    REPEAT_S,
    SURE,
    SlowRankWatch,
    StepSampler,
    concerns,
    decode,
    encode,
    interval,
)
from tests.fakes.leader import FakeLoop
from tests.fakes.ranks import FakeRank

# What launchers tell of their ranks' steps, and what the leader makes of it.


@given(st.lists(st.floats(1.1e-5, 1e6)))
def test_times_are_exact_to_a_thousandth(seconds: list[float]) -> None:
    """What is encoded comes back within 0.1 %; nothing stays nothing."""
    assert decode(encode(seconds), len(seconds)) == pytest.approx(seconds, rel=1e-3)
    assert decode(encode([0.0, -1.0, float("nan")]), 3) == [0.0, 0.0, 0.0]


@given(st.text(max_size=40), st.integers(0, 20))
def test_times_of_anybody(text: str, count: int) -> None:
    """Whatever is sent, the times are as many as expected, or it is refused."""
    with contextlib.suppress(ValueError):
        assert len(decode(text, count)) == count


def stepping(ranks: int, steps: int, duration_s: float) -> list[FakeRank]:
    """Ranks that have done so many steps of a second forward and the rest waiting."""
    fakes = [FakeRank(rank) for rank in range(ranks)]
    for fake in fakes:
        for step in range(steps):
            fake.step(step * duration_s, duration_s, forward=duration_s / 2, collective=duration_s / 2)
    return fakes


def test_a_sampler_tells_each_step_once() -> None:
    """Long steps are all told, without the first ten; the next call has only new ones."""
    ranks, sampler = stepping(2, 14, 1.0), StepSampler()
    sampler.collect({fake.rank: fake.page for fake in ranks})
    told = sampler.take()
    assert told is not None
    assert (told.ranks, told.steps) == ((0, 1), (10, 11, 12, 13))
    assert decode(told.seconds, 2 * 4 * len(PHASES))[0] == pytest.approx(0.5, rel=1e-3)
    assert sampler.take() is None
    ranks[0].step(15.0, 1.0, forward=0.5)
    sampler.collect({fake.rank: fake.page for fake in ranks})
    assert sampler.take() is None  # the other rank has not done it yet
    ranks[1].step(15.0, 1.0, forward=0.5)
    sampler.collect({fake.rank: fake.page for fake in ranks})
    told = sampler.take()
    assert told is not None
    assert told.steps == (14,)


def test_short_steps_are_sampled_by_their_number() -> None:
    """Of steps of 20 ms every 32nd is told, the same ones by every launcher."""
    ranks, sampler = stepping(1, 60, 0.02), StepSampler()
    sampler.collect({0: ranks[0].page})
    told = sampler.take()
    assert told is not None
    assert told.steps == (32,)


@given(st.floats(1e-4, 100.0), st.floats(0.5, 2.0))
def test_neighbouring_intervals_share_steps(duration_s: float, factor: float) -> None:
    """Launchers that see slightly different durations sample steps that divide each other."""
    one, other = interval(duration_s), interval(duration_s * factor)
    assert max(one, other) % min(one, other) == 0


def test_a_message_fits(ranks: int = 256) -> None:
    """A launcher with 256 ranks and eight steps stays below the 64 KiB of a message."""
    fakes, sampler = stepping(ranks, 30, 1.0), StepSampler()
    sampler.collect({fake.rank: fake.page for fake in fakes})
    told = sampler.take()
    assert told is not None
    body = CODEC.encode(Progress(1, 3, 2, told))
    assert len(json.dumps(body)) < 48_000
    assert CODEC.decode(json.loads(json.dumps(body))) == Progress(1, 3, 2, told)


def test_progress_of_an_older_launcher() -> None:
    """Without times it is understood."""
    assert CODEC.decode({"kind": "progress", "generation": 1, "furthest": 3, "committed": 2}) == Progress(1, 3, 2)


class Watched:
    """A watch over nodes n0, n1, … with four ranks each; its time is that of the loop."""

    def __init__(self, nodes: int = 4) -> None:
        self.loop, self.nodes = FakeLoop(), nodes
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.watch = SlowRankWatch(self.loop, lambda event, fields: self.said.append((event, fields)), self._now)
        self.step = 0

    def _now(self) -> float:
        return self.loop.now

    def go_on(self, steps: int, slow: Callable[[int], float] = lambda rank: 1.0, *, layout: bool = False) -> None:
        """Steps of a second in which each rank works as long as ``slow`` says."""
        for _ in range(steps):
            for node in range(self.nodes):
                ranks = range(4 * node, 4 * node + 4)
                seconds = [s for rank in ranks for s in (0.1 * slow(rank), 0.2 * slow(rank), 0.0, 0.0, 0.0, 1.0)]
                places = tuple(n for rank in ranks for n in (rank // 2, rank % 2, 0, 0)) if layout else ()
                told = StepTimes(tuple(ranks), (self.step,), tuple(range(4)), encode(seconds), places)
                self.watch.add(f"n{node}", told)
            self.step += 1
            self.loop.advance(1.0)
            while self.loop._busy:
                self.loop.settle()

    @property
    def kinds(self) -> list[str]:
        """The announced events."""
        return [event for event, _ in self.said]


def slow_rank(number: int, factor: float) -> Callable[[int], float]:
    """One rank works longer."""
    return lambda rank: factor if rank == number else 1.0


def test_a_slow_rank_is_announced_once() -> None:
    """Within a few steps of its beginning, with node, GPU and cost, and not again for a minute."""
    watched = Watched()
    watched.go_on(20)
    assert watched.said == []
    watched.go_on(9, slow_rank(6, 2.0))
    assert watched.kinds == [FOUND]
    fields = watched.said[0][1]
    assert (fields["rank"], fields["culprit_nodes"], fields["gpus"]) == (6, ["n1"], [2])
    assert 1.25 < fields["slowdown"] < 1.45  # not all of the steps that were judged were slow yet
    assert fields["compared"] == 16
    watched.go_on(20, slow_rank(6, 2.0))
    assert watched.kinds == [FOUND]
    watched.go_on(int(REPEAT_S), slow_rank(6, 2.0))
    assert watched.kinds == [FOUND, FOUND]


def test_a_straggler_that_recovers_is_taken_back() -> None:
    """Once no look has seen it for a while."""
    watched = Watched()
    watched.go_on(10, slow_rank(6, 2.0))
    watched.go_on(16 + int(GONE_S) + 10)
    assert watched.kinds == [FOUND, GONE]
    assert watched.said[-1][1]["ranks"] == [6]


def test_a_slow_node() -> None:
    """All four ranks of a node are one announcement."""
    watched = Watched()
    watched.go_on(10, lambda rank: 1.5 if rank // 4 == 2 else 1.0)
    assert [(event, fields["ranks"]) for event, fields in watched.said] == [(FOUND, [8, 9, 10, 11])]


def test_stages_of_a_pipeline() -> None:
    """With the layout, stages are compared with each other as a whole: nobody is to blame."""
    watched = Watched()
    watched.go_on(20, lambda rank: 3.0 if rank % 2 else 1.0, layout=True)
    assert [(fields["cause"], fields["ranks"]) for _, fields in watched.said] == [("unbalanced pipeline stages", [])]


def test_a_node_that_sends_nonsense() -> None:
    """It is ignored, and the others are judged."""
    watched = Watched()
    watched.watch.add("n9", StepTimes((99,), (1, 2), (0,), "nonsense"))
    watched.go_on(10, slow_rank(6, 2.0))
    assert watched.kinds == [FOUND]


def test_another_generation_begins_afresh() -> None:
    """Steps of ranks that have ended are not compared with those of new ones."""
    watched = Watched()
    watched.go_on(4, slow_rank(6, 2.0))
    watched.watch.forget()
    watched.go_on(4, slow_rank(6, 2.0))
    assert watched.said == []


def test_whom_it_concerns() -> None:
    """The node of one of the ranks, or that of rank 0 if nobody is to blame."""
    assert concerns({"ranks": [5, 6]}, [6, 7])
    assert not concerns({"ranks": [5, 6]}, [0, 1])
    assert concerns({"ranks": []}, [0, 1])
    assert not concerns({"ranks": None}, [2])


def test_what_is_not_sure_is_announced_at_the_second_look() -> None:
    """Where ranks differ by nature, one that is a little slow is announced a look later than a very slow one."""

    def uneven(slow: float) -> Callable[[int], float]:
        return lambda rank: slow if rank == 6 else 1.0 + 0.025 * (7 * rank % 5 - 2)

    found = []
    for slow in (3.0, 1.35):
        watched = Watched()
        watched.go_on(20, uneven(1.05))
        watched.go_on(9, uneven(slow))
        assert watched.kinds == [FOUND]
        found.append(watched.said[0][1])
    assert found[0]["confidence"] >= SURE > found[1]["confidence"]
    assert found[0]["step"] < found[1]["step"]


# Steps on rank pages, written down for the ledger.


def lines(folder: Path) -> list[dict[str, Any]]:
    assert not flush_all(10)
    path = folder / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(log: StepLog, ranks: Mapping[int, FakeRank], generation: int = 1) -> None:
    log.note(generation, {rank: fake.page for rank, fake in ranks.items()})


def test_a_line_has_the_steps_of_ten_seconds(tmp_path: Path) -> None:
    """Steps that take longer have a line each; phases are summed, and the setup is no part of a step."""
    log, rank = StepLog(tmp_path), FakeRank(0)
    rank.step(5.0, 5.0, setup=4.0, data=0.5)
    for second in range(6, 40):
        rank.step(float(second), 1.0, data=0.25, evaluation=0.5)
        note(log, {0: rank})
    log.flush()
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [5, 15, 25, 34]
    assert [line["steps"] for line in written] == [6, 10, 10, 9]
    assert (written[0]["step_s"], written[0]["data_s"], written[0]["evaluation_s"]) == (6.0, 1.75, 2.5)


@given(st.lists(st.integers(0, 3 * RING_STEPS), min_size=1, max_size=8))
def test_no_step_is_lost_between_two_looks(tmp_path_factory: Any, counts: list[int]) -> None:
    """Steps that the page has forgotten by the next look count like those that are left."""
    folder = tmp_path_factory.mktemp("steps")
    log, rank, now = StepLog(folder), FakeRank(0), 0.0
    for count in counts:
        for _ in range(count):
            now += 0.5
            rank.step(now, 0.5)
        log.note(1, {0: replace(rank.page, steps_reported=len(rank.records))})
    log.flush()
    written = lines(folder)
    assert sum(line["steps"] for line in written) == sum(counts)
    assert abs(sum(line["step_s"] for line in written) - 0.5 * sum(counts)) < 0.001 * max(1, len(written))


def test_one_rank_of_the_run_is_enough(tmp_path: Path) -> None:
    """The first that steps, on the node of rank 0: others write nothing."""
    here, there = StepLog(tmp_path / "here"), StepLog(tmp_path / "there")
    for log in (here, there):
        (tmp_path / ("here" if log is here else "there")).mkdir()
    ranks = {number: FakeRank(number) for number in range(4)}
    for number in (1, 2, 3):
        ranks[number].step(1.0, 1.0)
    note(here, {0: ranks[0], 1: ranks[1]})
    note(there, {2: ranks[2], 3: ranks[3]})
    here.flush()
    there.flush()
    assert [line["steps"] for line in lines(tmp_path / "here")] == [1]
    assert lines(tmp_path / "there") == []


def test_each_generation_has_its_own_lines(tmp_path: Path) -> None:
    """The steps before a restart are written when the next generation begins."""
    log, rank = StepLog(tmp_path), FakeRank(0)
    rank.step(1.0, 1.0)
    note(log, {0: rank})
    again = FakeRank(0, born=9.0)
    again.step(10.0, 1.0)
    note(log, {0: again}, generation=2)
    log.flush()
    assert [(line["generation"], line["steps"]) for line in lines(tmp_path)] == [(1, 1), (2, 1)]


def test_losses_and_tokens_that_a_program_reports_are_kept(tmp_path: Path) -> None:
    """Tokens of all ranks, those of other nodes like those here, and no count twice after a restart of the ranks."""
    log, ranks = StepLog(tmp_path), {rank: FakeRank(rank) for rank in range(2)}
    for second in range(1, 4):
        for rank in ranks.values():
            rank.step(float(second), 1.0)
            rank.records[-1] = replace(rank.records[-1], loss=5.0 - second if second < 3 else float("nan"))
        log.note(1, {number: replace(rank.page, tokens=100 * second) for number, rank in ranks.items()})
    again = FakeRank(0, born=9.0)
    again.step(10.0, 1.0)
    log.note(2, {0: replace(again.page, tokens=50)})
    log.flush()
    first, second_line = lines(tmp_path)
    assert (first["loss"], first["new_tokens"], first["tokens_per_s"]) == (3.0, 2400, 800.0)
    assert second_line["new_tokens"] == 400
    silent = StepLog(tmp_path / "silent")
    (tmp_path / "silent").mkdir()
    silent.note(1, {0: replace(again.page, steps=(replace(again.records[0], loss=float("nan")),))})
    silent.flush()
    assert not {"loss", "new_tokens", "tokens_per_s"} & lines(tmp_path / "silent")[0].keys()
