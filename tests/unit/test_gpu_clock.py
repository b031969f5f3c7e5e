"""The clock of CUDA events, with events that are complete when the test says so."""

from __future__ import annotations

from opsd.trainer.gpu_clock import MOST_PENDING, GpuClock


class FakeGpu:
    """``now`` in milliseconds; events recorded before ``reached`` are complete. Waiting is not possible."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = 0.0
        self.events = 0

    def event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self.at = gpu, -1.0

    def record(self) -> None:
        self.at = self._gpu.now

    def query(self) -> bool:
        return self.at <= self._gpu.reached

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query()
        assert end_event.query()
        return end_event.at - self.at


def compute(clock: GpuClock, gpu: FakeGpu, milliseconds: float) -> None:
    """A region in which the GPU works so long."""
    with clock.computing():
        gpu.now += milliseconds


def test_times_are_read_when_they_are_complete() -> None:
    """A step that the GPU has not finished has no time yet; it comes with a later step."""
    gpu = FakeGpu()
    clock = GpuClock(gpu.event)
    compute(clock, gpu, 30.0)
    compute(clock, gpu, 20.0)
    assert clock.take() == 0.0
    gpu.reached = gpu.now
    compute(clock, gpu, 70.0)
    assert clock.take() == 0.05
    gpu.reached = gpu.now
    assert clock.take() == 0.07
    assert clock.take() == 0.0


def test_events_are_used_again() -> None:
    """As many as are under way at once, however many steps there are."""
    gpu = FakeGpu()
    clock = GpuClock(gpu.event)
    for _ in range(100):
        compute(clock, gpu, 1.0)
        gpu.reached = gpu.now
        assert clock.take() == 0.001
    assert gpu.events == 2


def test_a_gpu_that_never_answers() -> None:
    """Does not make memory grow."""
    gpu = FakeGpu()
    gpu.reached = -2.0
    clock = GpuClock(gpu.event)
    for _ in range(1000):
        compute(clock, gpu, 1.0)
        assert clock.take() == 0.0
    assert gpu.events <= 2 * (MOST_PENDING + 2)
