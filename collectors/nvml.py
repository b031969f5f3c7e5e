"""NVIDIA GPUs through NVML: health and load under dcgm-exporter's names, and what it does not have."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from pydantic import Field

from opsd.collectors.base import Collector, Context, Event, GpuFact, NoData, Plugin, Reading, Sample
from opsd.collectors.dcgm import DcgmCollector
from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.collectors.lib.kernel.xid import LABELS as XID_LABELS
from opsd.collectors.lib.kernel.xid import TOTAL, Xid, XidLedger, xid_event
from opsd.collectors.lib.nvml import gpm, mig, series
from opsd.collectors.lib.nvml.driver import Driver, NoDriverError, NoPermissionError, NvmlError, SessionOverError
from opsd.collectors.lib.nvml.gpu import Gpu
from opsd.collectors.lib.processes import DEAD, process_letter, sees_all_processes
from opsd.settings.sections import CollectorSettings

__all__ = ["NvmlCollector", "NvmlError", "NvmlSettings", "PowerControl"]

_PROFILING = frozenset(metric.name for metric in gpm.METRICS)


class NvmlSettings(CollectorSettings):
    """GPUs through the NVIDIA driver."""

    library: str | None = Field(
        default=None, examples=["/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"], description="The driver's library."
    )
    profiling: bool = Field(
        default=True, description="Read what the GPUs' units do (SM, tensor cores, memory), on Hopper and later."
    )


class NvmlCollector:
    """The GPUs of this node.

    ``library`` is the path of another ``libnvidia-ml.so.1`` than the system's; a process can use one only. ``clock`` is
    in seconds since boot, as time.monotonic on Linux. If the session has ended because the driver was reloaded, it is
    reopened at the next collection. A session with a lost GPU is reopened every ``reopen_s``, to find the GPU after a
    reset.
    ``xids`` is the ledger shared with the other sources of Xids, so that each becomes one event. ``process_letter``
    looks up the state of a process, None gone; without it nothing is said about dead ones. ``profiling`` also reads
    what the GPUs' units do, except while ``profiled_elsewhere`` says that something else on the node does.
    ``gpu_owners`` learns which processes hold which GPU, and when each GPU last worked.
    """

    name = "nvml"
    metrics = (*series.METRICS, *gpm.METRICS, *mig.METRICS, TOTAL)

    def __init__(
        self,
        library: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        hostname: str | None = None,
        reopen_s: float = 60.0,
        xids: XidLedger | None = None,
        process_letter: Callable[[int], str | None] | None = None,
        profiling: bool = True,
        profiled_elsewhere: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
        gpu_owners: GpuOwners | None = None,
    ) -> None:
        self._library = library
        self._clock = clock
        self._wall = wall
        self._hostname = hostname or os.uname().nodename
        self._reopen_s = reopen_s
        self._driver: Driver | None = None
        self._opened = 0.0
        self._gpus: dict[int, Gpu] = {}
        self._known: dict[int, series.Identity] = {}
        self._lost: dict[int, str] = {}
        self._ledger = xids or XidLedger()
        self._process_letter = process_letter
        self._profiling = profiling
        self._profiled_elsewhere = profiled_elsewhere
        self._profiles = False
        self._sleep = sleep
        self._gpu_owners = gpu_owners or GpuOwners()
        self._orphans: dict[int, tuple[int, ...]] = {}
        self._reloads = 0
        self._worked: dict[int, float] = {}
        self._held_xids: list[tuple[float, int, int, int | None]] = []

    def collect(self) -> Reading | NoData:
        """Read all GPUs. Raises NvmlError if the driver cannot be initialised or its session has just ended."""
        if self._lost and self._clock() - self._opened >= self._reopen_s:
            self._close()
        try:
            driver = self._driver or self._open()
            if self._profiles != self._may_profile():
                self._profile(self._clock())
            now = self._clock()
            samples = [sample for index in sorted(self._known) for sample in self._read(index, now)]
        except NoDriverError as error:
            self._close()
            return NoData(f"no NVIDIA driver on this node: {error}")
        except NvmlError as error:
            self._reloads += self._driver is not None and isinstance(error, SessionOverError)
            self._close()
            raise NvmlError(f"the NVIDIA driver failed and will be opened again: {error}") from error
        if not self._known:
            self._close()
            return NoData("the NVIDIA driver sees no GPU on this node")
        if self._process_letter is not None:
            found = ((index, gpu.holders) for index, gpu in self._gpus.items())
            self._gpu_owners.holders = {index: holders for index, holders in found if holders is not None}
            parted = ((index, gpu.instances) for index, gpu in self._gpus.items())
            self._gpu_owners.instances = {index: instances for index, instances in parted if instances is not None}
        self._gpu_owners.worked = self._worked = self._last_work(now)
        events = tuple(self._new_xids(driver))
        samples += self._state(driver)
        return Reading(tuple(samples), events, tuple(self._facts(driver)))

    def _last_work(self, now: float) -> dict[int, float]:
        """When each GPU that tells last worked."""
        told = ((index, gpu.works) for index, gpu in self._gpus.items() if index not in self._lost)
        return {index: now if works else self._worked.get(index, now) for index, works in told if works is not None}

    def _open(self) -> Driver:
        driver = self._driver = Driver(self._library)
        self._opened = self._clock()
        self._gpus, self._lost, self._orphans = {}, {}, {}
        for index in range(driver.count):
            try:
                gpu = self._gpus[index] = Gpu(driver, index, self._hostname)
                self._known[index] = gpu.identity
            except (NoDriverError, SessionOverError):
                raise
            except NvmlError as error:
                self._known.setdefault(index, series.Identity(index, "", "", ""))
                self._lost[index] = str(error)
        for index in self._known.keys() - range(driver.count):
            self._lost[index] = "the driver does not list it any more"
        self._ledger.expect(identity.pci_bus_id for identity in self._known.values() if identity.uuid)
        self._profiles = False
        return driver

    def _may_profile(self) -> bool:
        return self._profiling and not self._profiled_elsewhere()

    def _profile(self, now: float) -> None:
        """Begin or cease to read what the units do."""
        self._profiles = not self._profiles
        for index, gpu in self._gpus.items():
            if not self._profiles:
                gpu.close()
                continue
            try:
                gpu.profile(now)
            except (NoDriverError, SessionOverError):
                raise
            except NvmlError as error:
                self._lost[index] = str(error)
        if any(gpu.profiled for gpu in self._gpus.values()):
            self._sleep(gpm.MIN_INTERVAL_S)  # once, so that no series is missing from the first reading

    def _close(self) -> None:
        for gpu in self._gpus.values():
            gpu.close()
        if self._driver is not None:
            self._driver.close()
        self._driver = None
        self._gpu_owners.holders, self._gpu_owners.worked, self._gpu_owners.instances = {}, {}, {}

    def _read(self, index: int, now: float) -> list[Sample]:
        if index not in self._gpus:
            return []
        try:
            samples = self._gpus[index].read(now)
        except (NoDriverError, SessionOverError):
            raise
        except NvmlError as error:
            self._lost[index] = str(error)
            return []
        self._lost.pop(index, None)
        samples += self._orphaned(index)
        return samples

    def _orphaned(self, index: int) -> Iterator[Sample]:
        """GPUs that dead processes hold. A GPU is released with its process, unless the driver hangs."""
        if self._process_letter is None:
            return
        gpu = self._gpus[index]
        self._orphans[index] = dead = tuple(pid for pid in gpu.processes if self._process_letter(pid) in DEAD)
        labels = gpu.identity.labels(series.ORPHANS, self._hostname)
        yield Sample(series.ORPHANS, len(dead), labels)
        yield Sample(series.ORPHAN_MEMORY, sum(gpu.processes[pid].memory for pid in dead), labels)

    def _new_xids(self, driver: Driver) -> Iterator[Event]:
        at = self._wall()
        new = [(at, *xid) for xid in driver.xids()]
        due, self._held_xids = (self._held_xids, new) if self._ledger.kernel_log else ([*self._held_xids, *new], [])
        for at, index, code, instance in due:
            gpu = self._known[index]
            if self._ledger.report(code, gpu.pci_bus_id, at=at, source=self.name):
                where: dict[str, object] = {"gpu": index, "uuid": gpu.uuid}
                if instance is not None and (job := self._gpu_owners.job_on(index, instance)):
                    where["job"] = job
                of = "" if instance is None else f"GPU-I:{instance:02d}"
                yield xid_event(Xid(code, gpu.pci_bus_id, mig=of), at=at, source=self.name, where=where)

    def _state(self, driver: Driver) -> Iterator[Sample]:
        """What is known of every GPU, whether it answers or not."""
        if not self._ledger.kernel_log:
            yield from self._ledger.samples()
        yield Sample(series.DRIVER_RELOADS, self._reloads)
        for index, identity in self._known.items():
            yield Sample(series.UP, 0.0 if index in self._lost else 1.0, identity.labels(series.UP, self._hostname))
            if not identity.uuid:
                continue  # never seen answering
            labels = identity.labels(series.XID_ERRORS, self._hostname)
            yield Sample(series.XID_ERRORS, self._ledger.newest(identity.pci_bus_id), labels)
            if gpu := self._gpus.get(index):
                simulated = "yes" if driver.simulated else "no"
                what = (identity.pci_bus_id, identity.model, driver.version, gpu.vbios, simulated)
                yield Sample(series.INFO, 1.0, identity.labels(series.INFO, self._hostname, *what))

    def _facts(self, driver: Driver) -> Iterator[GpuFact]:
        for i in self._known.values():
            lost = self._lost.get(i.index)
            orphans = () if lost else self._orphans.get(i.index, ())
            yield GpuFact(i.index, i.uuid, i.pci_bus_id, i.model, driver.simulated, lost, orphans)


class PowerControl:
    """Sets power limits of GPUs; apart from the collector, which only ever reads."""

    def __init__(self, library: str | None = None) -> None:
        self._library = library

    def set_power_limit(self, gpu: int | str, watts: float) -> None:
        """Set the board power limit of the GPU with this index or UUID, until it is reset. Needs root.

        Raises NvmlError if the driver is not there, the GPU is unknown or lost, permission is missing, or ``watts`` is
        outside the limits of the board.
        """
        driver = Driver(self._library)
        try:
            driver.set_power_limit(gpu, watts)
        except NoPermissionError as error:
            raise NvmlError(f"only root can set the power limit of GPU {gpu}; run the agent as root") from error
        except NvmlError as error:
            raise NvmlError(f"the power limit of GPU {gpu} was not set to {watts:g} W: {error}") from error
        finally:
            driver.close()


def _make(settings: NvmlSettings, context: Context) -> Collector:
    def profiled_elsewhere() -> bool:
        dcgm = context.collector(DcgmCollector)
        return dcgm is not None and not _PROFILING.isdisjoint(dcgm.covered)

    return NvmlCollector(
        settings.library,
        hostname=context.node,
        xids=context.shared(XidLedger),
        process_letter=process_letter if sees_all_processes() else None,
        profiling=settings.profiling,
        profiled_elsewhere=profiled_elsewhere,
        gpu_owners=context.shared(GpuOwners),
    )


COLLECTOR = Plugin("nvml", NvmlSettings, _make, {**series.LABELS, **mig.LABELS, **XID_LABELS}, witness=True)
