"""Watches the GPUs through NVML during another check's load."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Final, Self

from opsd.collectors.base import GpuFact, Metric, NoData, Sample
from opsd.collectors.lib.nvml import series
from opsd.collectors.nvml import NvmlCollector, NvmlError
from opsd.preflight.base import Finding, Measure, Measurement, Verdict

_INTERVAL_S: Final = 1.0
_BAD_REASONS: Final = {
    "hw_slowdown": "a hardware slowdown",
    "hw_thermal": "the hardware's thermal limit",
    "sw_thermal": "the driver's thermal limit",
    "hw_power_brake": "the power brake",
}
"""The power cap (sw_power_cap) is not among them: at full load an H100 normally runs near 700 W."""
_WARN_SHARE: Final = 0.01
_FAIL_SHARE: Final = 0.10

MEASURES: Final = (
    Measure("clock", "hertz", "lowest SM clock under load", required=False),
    Measure("power", "watts", "highest power", required=False),
    Measure("hottest", "celsius", "highest temperature", better="lower", noise=0.1, required=False),
    Measure("throttled", "ratio", "time that clocks were held back", required=False),
)


class Sampler(ABC):
    """Samples in a thread of its own between ``__enter__`` and ``__exit__``."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    @abstractmethod
    def _sample(self) -> None:
        """Take samples until ``_stop`` is set."""


class Watch(Sampler):
    """Samples every GPU once a second between ``__enter__`` and ``__exit__``; without a driver there are no samples."""

    def __init__(self, library: str | None = None) -> None:
        super().__init__()
        self._collector = NvmlCollector(library)
        self._series: dict[tuple[str, Metric, str], list[float]] = {}
        self._gpus: dict[int, GpuFact] = {}
        self._seconds = 0.0

    def _sample(self) -> None:
        while True:
            last = self._stop.wait(_INTERVAL_S)
            try:
                reading = self._collector.collect()
            except NvmlError:
                reading = NoData("the driver failed")
            if not isinstance(reading, NoData):
                self._seconds += _INTERVAL_S
                self._gpus |= {fact.index: fact for fact in reading.facts if isinstance(fact, GpuFact)}
                for sample in reading.samples:
                    self._keep(sample)
            if last:
                return

    def _keep(self, sample: Sample) -> None:
        if sample.metric in (series.SM_CLOCK, series.POWER_USAGE, series.GPU_TEMP, series.THROTTLE):
            reason = sample.labels[-1] if sample.metric is series.THROTTLE else ""
            self._series.setdefault((sample.labels[0], sample.metric, reason), []).append(sample.value)

    def measurements(self) -> Iterator[Measurement]:
        """Lowest clock, highest power and temperature, and the share of time throttled, of every GPU."""
        for index in self._gpus:
            name = f"GPU {index}"
            for measure, metric, extreme, scale in (
                ("clock", series.SM_CLOCK, min, 1e6),
                ("power", series.POWER_USAGE, max, 1.0),
                ("hottest", series.GPU_TEMP, max, 1.0),
            ):
                if values := self._series.get((str(index), metric, "")):
                    yield Measurement(measure, extreme(values) * scale, name)
            yield Measurement("throttled", max(self.throttled(index).values(), default=0.0), name)

    def throttled(self, index: int) -> Mapping[str, float]:
        """Share of the watched time for which each bad reason throttled a GPU."""
        shares = {}
        for reason in _BAD_REASONS:
            values = self._series.get((str(index), series.THROTTLE, reason), [])
            if len(values) > 1:
                shares[reason] = min(1.0, (values[-1] - values[0]) / (_INTERVAL_S * (len(values) - 1)))
        return shares

    def findings(self) -> Iterator[Finding]:
        """Throttling that a healthy GPU under full load does not show, and GPUs that were lost."""
        for index, gpu in self._gpus.items():
            name = f"GPU {index}"
            if gpu.lost is not None:
                yield Finding(
                    Verdict.FAIL, f"{name} was lost under load: {gpu.lost}", "drain and reboot the node", name
                )
            for reason, share in self.throttled(index).items():
                if share > _WARN_SHARE:
                    verdict = Verdict.FAIL if share > _FAIL_SHARE else Verdict.WARN
                    summary = f"{name} was throttled {share:.0%} of the time by {_BAD_REASONS[reason]}"
                    yield Finding(verdict, summary, "check fans, air flow, power supplies and the inlet", name)
