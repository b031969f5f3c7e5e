"""One GPU of an open session with the NVIDIA driver: everything it tells, as samples.

How long each reason has held a GPU's clocks back, exact where the driver counts it, sampled where it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from opsd.collectors.base import Metric, Sample
from opsd.collectors.lib.nvml import driver, fields, gpm, series
from opsd.collectors.lib.nvml.driver import CallError, NvmlError
from opsd.collectors.lib.nvml.mig import MigReader

REASONS: Final[Mapping[str, int]] = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Reason to its bit in the clocks-event-reason mask (nvmlClocksEventReason* in nvml.h). Idle is no throttling."""

_MAX_GAP_S = 5.0
_SLACK_S = 1.0
_PATIENCE_S = 10.0


class ThrottleClock:
    """The throttle seconds of one GPU, per reason.

    A driver's cumulative counter is used as long as it behaves like one. The field numbers of these counters differ
    between drivers and some answer with something else, so a counter is given up for good, and the mask sampled
    instead, once it claims more time than the machine is up, grows faster than time, or stands still while its
    reason is seen active. A gap between two samples counts for at most five seconds of throttling.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(REASONS, 0.0)
        self._counted: dict[str, float] = {}
        self._stuck_s = dict.fromkeys(REASONS, 0.0)
        self._distrusted: set[str] = set()
        self._last: float | None = None

    @property
    def sampled(self) -> frozenset[str]:
        """Reasons whose counter was given up."""
        return frozenset(self._distrusted)

    def update(self, now: float, mask: int | None, counters: Mapping[str, int]) -> Mapping[str, float]:
        """Take one sample and return the seconds per reason so far.

        ``now`` is in seconds since boot, ``mask`` the clocks-event reasons or None if the driver does not tell,
        ``counters`` the driver's cumulative nanoseconds of the reasons it has a counter for.
        """
        elapsed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        for reason, bit in REASONS.items():
            active = mask is not None and bool(mask & bit)
            if reason in counters and reason not in self._distrusted:
                counted = counters[reason] / 1e9
                if self._plausible(reason, counted, now, elapsed, active):
                    self._seconds[reason] = self._counted[reason] = counted
                    continue
                self._distrusted.add(reason)
            if active:
                self._seconds[reason] += min(elapsed, _MAX_GAP_S)
        return dict(self._seconds)

    def _plausible(self, reason: str, counted: float, now: float, elapsed: float, active: bool) -> bool:
        growth = counted - self._counted.get(reason, counted)
        first = reason not in self._counted
        self._stuck_s[reason] = self._stuck_s[reason] + elapsed if active and growth == 0 and not first else 0.0
        return counted <= now + _SLACK_S and growth <= elapsed * 1.1 + _SLACK_S and self._stuck_s[reason] < _PATIENCE_S


IDLE_MIB: Final = 64.0
"""A GPU that uses less memory is held by nobody: a context of CUDA takes some hundred."""

LINKS_S: Final = 5.0
RARE_S: Final = 60.0
"""Seconds between two looks at each NVLink's state and errors, which are most of its fields, and at the rest."""


class _Bound(NamedTuple):
    """A driver call and the series, with their label values, that its numbers go to."""

    read: Callable[[Any], tuple[float | None, ...]]
    series: tuple[tuple[Metric, tuple[str, ...]], ...]


class Gpu:
    """A GPU that answers. Values that turn out to be unsupported are not read again.

    ``processes`` is the latest share of each compute process. ``works`` says whether a kernel ran lately (None:
    unknown, as with MIG). Raises NvmlError if the GPU does not answer.
    """

    processes: Mapping[int, driver.Use]
    works: bool | None = None
    _lists_processes = False
    _used_mib = math.inf

    def __init__(self, session: driver.Driver, index: int, hostname: str) -> None:
        self._library = session.library
        self._hostname = hostname
        with driver.translated():
            self._handle = session.handle(index)
            self.identity = driver.identify(self._handle, index)
            self.vbios = self._vbios()
            links = self._link_count()
            self._static = self._ask([self._bind(call) for call in driver.ONCE])
        self.processes = {}
        self._calls = self._each_tick()
        self._mig = MigReader(self._handle, index, self.identity.uuid)
        self._rare = [self._bind(call) for call in driver.EACH_MINUTE]
        self._rarely: list[Sample] = []
        self._rare_at = -math.inf
        self._fields = self._reader(self._routes(fields.field_plan(links)))
        self._link_fields = self._reader(self._routes(fields.link_plan(links)))
        self._of_links: list[Sample] = []
        self._links_at = -math.inf
        self._units: gpm.GpmReader | None = None
        self._bandwidth = self._labels(series.NVLINK_BANDWIDTH)
        self._link_errors = [self._labels(series.NVLINK_LINK_ERRORS, str(link)) for link in range(links)]
        self._reasons = {reason: self._labels(series.THROTTLE, reason) for reason in REASONS}
        self._throttle = ThrottleClock()

    @property
    def profiled(self) -> bool:
        """True if it tells what its units do."""
        return self._units is not None

    @property
    def instances(self) -> Mapping[int, tuple[int, ...]] | None:
        """The processes on each GPU instance of MIG by its number; None without MIG."""
        if not self._mig.enabled:
            return None
        found: dict[int, tuple[int, ...]] = dict.fromkeys(self._mig.gpu_instances, ())
        for pid, use in self.processes.items():
            if use.instance is not None:
                found[use.instance[0]] = (*found.get(use.instance[0], ()), pid)
        return found

    @property
    def holders(self) -> tuple[int, ...] | None:
        """The processes that hold the GPU; None if the driver does not list them, as it may not across containers."""
        complete = self._lists_processes and (self.processes or self._used_mib < IDLE_MIB)
        return tuple(self.processes) if complete else None

    def profile(self, now: float) -> None:
        """Begin to watch what the GPU's units do, where it can tell. Raises NvmlError if it does not answer."""
        if gpm.supported(self._library, self._handle):
            with driver.translated():
                self._units = gpm.GpmReader(self._library, self._handle, driver.check, self._labels)
                self._ask_units(now)

    def read(self, now: float) -> list[Sample]:
        """Everything the GPU tells at ``now``, in seconds since boot. Raises NvmlError if it does not answer."""
        with driver.translated():
            asked = len(self._calls)
            samples = self._ask(self._calls)
            if len(self._calls) < asked:
                self._mig.look_again()  # switched on, it keeps the GPU from telling some of it
            if now - self._rare_at >= RARE_S:
                self._rarely, self._rare_at = [*self._ask(self._rare), *self._domain()], now
            if now - self._links_at >= LINKS_S:
                self._of_links, self._links_at = self._ask_links(), now
            of_fields, rest = self._ask_fields(self._fields)
            of_units = self._ask_units(now)
            had_mig = self._mig.enabled
            of_instances = [*self._mig.read(now, self.processes.values())]
        if not samples:
            raise NvmlError("the driver knows the GPU but answers no call about it")
        if not self.processes:
            self._used_mib = next((sample.value for sample in samples if sample.metric is series.FB_USED), math.inf)
        percent = next((sample.value for sample in samples if sample.metric is series.GPU_UTIL), None)
        if had_mig and not self._mig.enabled:
            self._calls = self._each_tick()  # a GPU without MIG tells again what one with it does not
        self.works = None if percent is None else percent > 0
        mask = next((int(sample.value) for sample in samples if sample.metric is series.EVENT_REASONS), None)
        samples += of_fields
        samples += of_units
        samples += of_instances
        samples.append(Sample(series.PROFILING, float(self.profiled), self._labels(series.PROFILING)))
        samples += self._of_links
        if (kib := fields.nvlink_kib(of_fields)) is not None:
            samples.append(Sample(series.NVLINK_BANDWIDTH, kib, self._bandwidth))
        for reason, seconds in self._throttle.update(now, mask, fields.throttle_counters(rest)).items():
            samples.append(Sample(series.THROTTLE, seconds, self._reasons[reason]))
        samples += self._static
        samples += self._rarely
        return samples

    def close(self) -> None:
        """Give back what the driver holds for it; never fails."""
        if self._units is not None:
            self._units.close()
            self._units = None

    def _domain(self) -> list[Sample]:
        """The NVLink domain as a sample, if it reaches beyond the node."""
        if (domain := driver.fabric_domain(self._handle)) is None:
            return []
        cluster, clique = domain
        return [Sample(series.FABRIC_INFO, 1.0, self._labels(series.FABRIC_INFO, cluster, str(clique)))]

    def _ask_links(self) -> list[Sample]:
        samples, rest = self._ask_fields(self._link_fields)
        by_link, by_type = fields.link_errors(rest)
        for link, errors in by_link.items():
            samples.append(Sample(series.NVLINK_LINK_ERRORS, errors, self._link_errors[link]))
        for kind, errors in by_type.items():
            samples.append(Sample(series.NVLINK_ERRORS, errors, self._labels(series.NVLINK_ERRORS, kind)))
        return samples

    def _labels(self, metric: Metric, *extra: str) -> tuple[str, ...]:
        return self.identity.labels(metric, self._hostname, *extra)

    def _vbios(self) -> str:
        try:
            return driver.vbios_version(self._handle)
        except CallError as error:
            if error.value not in driver.UNSUPPORTED:
                raise
            return ""

    def _link_count(self) -> int:
        _, _, answer = self._reader({(fields.LINK_COUNT, 0): None}).read()
        return next((int(fields.number(field.type, field.bits)) for field in answer if not field.result), 0)

    def _reader(self, routes: Mapping[fields.FieldKey, fields.Route | None]) -> fields.FieldReader:
        return fields.FieldReader(self._library.nvmlDeviceGetFieldValues, self._handle, routes)

    def _routes(
        self, plan: Mapping[fields.FieldKey, fields.Target | None]
    ) -> dict[fields.FieldKey, fields.Route | None]:
        return {
            key: target and (target.metric, target.scale, self._labels(target.metric, *target.extra))
            for key, target in plan.items()
        }

    def _bind(self, call: driver.Call) -> _Bound:
        extras = call.extra or ((),) * len(call.metrics)
        labelled = ((m, self._labels(m, *extra)) for m, extra in zip(call.metrics, extras, strict=True))
        return _Bound(call.read, tuple(labelled))

    def _each_tick(self) -> list[_Bound]:
        processes = driver.Call(self._count_processes, (series.PROCESSES, series.PROCESS_MEMORY))
        return [self._bind(call) for call in (*driver.EACH_TICK, processes)]

    def _count_processes(self, handle: Any) -> tuple[float, ...]:
        self.processes = driver.processes(handle)
        self._lists_processes = True
        return len(self.processes), sum(use.memory for use in self.processes.values())

    def _ask(self, calls: list[_Bound]) -> list[Sample]:
        """The samples of ``calls``; unsupported ones are removed from the list."""
        samples = []
        for call in [*calls]:
            try:
                numbers = call.read(self._handle)
            except CallError as error:
                if error.value not in driver.UNSUPPORTED:
                    raise
                calls.remove(call)
            else:
                for (metric, labels), value in zip(call.series, numbers, strict=True):
                    if value is not None:
                        samples.append(Sample(metric, value, labels))
        return samples

    def _ask_fields(self, reader: fields.FieldReader) -> tuple[list[Sample], list[fields.FieldValue]]:
        code, samples, rest = reader.read()
        if code in driver.UNSUPPORTED:
            return [], []
        lost = any(field.result == driver.GPU_IS_LOST for field in rest)
        driver.check(driver.GPU_IS_LOST if lost else code)
        if unsupported := [(field.id, field.scope) for field in rest if field.result in driver.UNSUPPORTED]:
            reader.forget(unsupported)
        return samples, rest

    def _ask_units(self, now: float) -> list[Sample]:
        try:
            return self._units.read(now) if self._units is not None else []
        except CallError as error:
            if error.value not in driver.UNSUPPORTED:
                raise
            self.close()
            return []
