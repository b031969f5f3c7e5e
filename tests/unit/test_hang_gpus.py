"""What the GPUs of ranks say about a hang: work is progress, a kernel that spins is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.lib.nvml.driver import DeviceUse
from opsd.launch.hangs.culprit import Hang
from opsd.launch.hangs.gpu_probe import report, samples_of
from opsd.launch.hangs.gpus import GpuState, GpuUse, Sample, parse_uses, state_of
from opsd.launch.hangs.hang import HangDetector
from opsd.launch.hangs.limits import HangLimits
from tests.fakes.ranks import FakeRank

WORKS = GpuUse((3,), GpuState.WORKS, 99, 41)
SPINS, STILL = GpuUse((3,), GpuState.SPINS, 100, 0), GpuUse((3,), GpuState.IDLE, 0, 0)


def after(seconds: float, *gpus: GpuUse, source: str = "observed") -> Hang | None:
    """What is found ``seconds`` after both ranks of a warm run stood still in forward, with these GPUs."""
    judge, now = HangDetector(HangLimits()), 100.0
    ranks = [FakeRank(number, born=now, since=now, source=source) for number in range(2)]
    for _ in range(20):
        now += 0.2
        for rank in ranks:
            rank.step(now, 0.2, forward=0.2)
    for rank in ranks:
        rank.enter("forward", now)
    begun = now
    while now < begun + seconds:
        now += 0.5
        stall = judge.check([rank.observed(now) for rank in ranks], now)
        if stall is not None and stall.due and (hang := judge.verdict(stall, {}, dict(enumerate(gpus)))):
            return hang
    return None


@pytest.mark.parametrize("source", ["observed", "client"])
def test_a_rank_whose_gpu_works_is_not_hung_for_minutes(source: str) -> None:
    """A kernel of eight minutes, in programs that report phases and in those that do not; not for ever."""
    assert after(480.0, WORKS, WORKS, source=source) is None
    hang = after(1000.0, WORKS, WORKS, source=source)
    assert hang is not None
    assert hang.stuck_s == pytest.approx(900.0, abs=2.0)


def test_others_wait_for_a_rank_whose_gpu_works() -> None:
    """One computes; the kernel of the other spins until it comes."""
    assert after(480.0, WORKS, SPINS) is None


@pytest.mark.parametrize("gpu", [SPINS, STILL])
def test_a_gpu_that_spins_or_stands_still_excuses_nothing(gpu: GpuUse) -> None:
    """NVML calls a GPU busy on which NCCL only waits."""
    hang = after(70.0, gpu, gpu)
    assert hang is not None
    assert hang.stuck_s == pytest.approx(60.0, abs=1.0)


def test_the_rank_whose_gpu_stands_still_is_named() -> None:
    """All pages and processes look alike: the others' kernels wait for it."""
    hang = after(70.0, SPINS, STILL)
    assert hang is not None
    assert hang.rank == 1
    assert "GPU 3 runs no kernel" in hang.evidence


SAMPLES = st.lists(st.builds(Sample, st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=6)


@given(SAMPLES, SAMPLES)
def test_a_longer_look_never_takes_work_back(samples: list[Sample], more: list[Sample]) -> None:
    """Nor does it make a GPU idle on which something ran."""
    before, after_more = state_of(samples), state_of(samples + more)
    assert list(GpuState).index(after_more) >= list(GpuState).index(before)


def test_kernels_that_begin_and_end_are_work() -> None:
    """Small ones leave the memory controller idle, too; one that waits runs without a break."""
    assert state_of([Sample(40, 0), Sample(100, 0)]) is GpuState.WORKS
    assert state_of([Sample(99, 0), Sample(100, 0)]) is GpuState.SPINS
    assert state_of([Sample(99, 0), Sample(100, 1)]) is GpuState.WORKS


def test_what_others_do_on_a_shared_gpu_is_not_a_ranks_work() -> None:
    """Samples of its processes count; without them nothing is known."""
    shared = DeviceUse(frozenset({1, 9}), 90, 50, {9: (90, 50)})
    assert samples_of(frozenset({1}), [shared]) == [(0, 0)]
    assert samples_of(frozenset({9}), [shared]) == [(90, 50)]
    assert samples_of(frozenset({1}), [shared._replace(processes=None)]) == []
    assert samples_of(frozenset({2}), [shared]) == []


def test_a_gpu_of_one_rank_speaks_for_it() -> None:
    """Where the driver has no samples of processes, as with MIG, and where these are late."""
    alone = DeviceUse(frozenset({1}), 90, 50, None)
    assert samples_of(frozenset({1, 2}), [alone, alone._replace(processes={})]) == [(90, 50), (90, 50)]


def test_the_busiest_of_several_gpus_decides() -> None:
    """A rank may hold more than its own."""
    looks = {gpu: [DeviceUse(frozenset({1}), kernels, work, None)] for gpu, kernels, work in ((0, 0, 0), (5, 97, 30))}
    (entry,) = report({1: frozenset({1}), 2: frozenset({2})}, looks)
    assert parse_uses(json.dumps([entry])) == {1: GpuUse((0, 5), GpuState.WORKS, 97, 30)}


def test_a_probe_that_was_killed_says_nothing() -> None:
    """Its output may end anywhere."""
    text = json.dumps([{"pid": 7, "gpus": [3], "state": "spins", "kernels": 100, "work": 0}])
    assert parse_uses(text) == {7: SPINS}
    assert all(parse_uses(text[:length]) == {} for length in range(len(text)))
