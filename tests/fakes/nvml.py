"""NVML collectors in a process of their own, and devices where no driver is loaded.

NVML collectors in a process of their own: one process can load only one driver library.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any, Protocol, cast

from opsd.collectors.base import GpuFact, NoData, Reading
from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.collectors.lib.kernel.xid import XidLedger
from opsd.collectors.nvml import NvmlCollector, PowerControl


class _BesideKernelLog:
    """A collector whose ledger another source, the kernel log, writes into as well."""

    def __init__(self, library: str) -> None:
        self._ledger = XidLedger()
        self._ledger.kernel_log = True
        self._collector = NvmlCollector(library, xids=self._ledger)

    def collect(self) -> Reading | NoData:
        return self._collector.collect()

    def kernel_tells(self, code: int, pci_bus_id: str) -> bool:
        """Whether the kernel log is the first to tell."""
        return self._ledger.report(code, pci_bus_id, at=time.time(), source="kmsg")


class _Holders:
    """Who holds which GPU, as a collector tells the others."""

    def __init__(self, library: str) -> None:
        self._gpu_owners = GpuOwners()
        self._collector = NvmlCollector(library, process_letter=process_letter, gpu_owners=self._gpu_owners)

    def collect(self) -> Reading | NoData:
        return self._collector.collect()

    def read(self) -> dict[int, tuple[int, ...]]:
        self._collector.collect()
        return dict(self._gpu_owners.holders)

    def worked(self) -> dict[int, float]:
        self._collector.collect()
        return dict(self._gpu_owners.worked)

    def instances(self) -> dict[int, Mapping[int, tuple[int, ...]]]:
        return dict(self._gpu_owners.instances)

    def tell(self, jobs_on: Mapping[tuple[int, int], frozenset[str]]) -> None:
        """What the collector of jobs has found out."""
        self._gpu_owners.jobs_on = jobs_on


class _Manager(BaseManager):
    """Serves objects that live in another process."""


_Manager.register("NvmlCollector", NvmlCollector, exposed=("collect",))
_Manager.register("BesideKernelLog", _BesideKernelLog, exposed=("collect", "kernel_tells"))
_Manager.register("Holders", _Holders, exposed=("collect", "read", "worked", "instances", "tell"))
_Manager.register("PowerControl", PowerControl, exposed=("set_power_limit",))


class DriverProcess(Protocol):
    """What a test asks of the other process."""

    def NvmlCollector(self, library: str | None = None, **options: Any) -> Any: ...
    def BesideKernelLog(self, library: str) -> Any: ...
    def Holders(self, library: str) -> Any: ...
    def PowerControl(self, library: str | None = None) -> PowerControl: ...


def process_letter(pid: int) -> str | None:
    """A node on which processes below 100 run, those below 200 are zombies, and the others are gone."""
    return "S" if pid < 100 else "Z" if pid < 200 else None


def hasty() -> float:
    """A clock that makes what is done every few seconds happen at every other look."""
    return time.monotonic() * 100


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.update(environment)


@contextmanager
def driver_process(environment: Mapping[str, str]) -> Iterator[DriverProcess]:
    """A process with ``environment`` in which collectors can be made."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["opsd.collectors.nvml"])
    manager = _Manager(ctx=context)
    manager.start(initializer=_set_environment, initargs=(dict(environment),))
    try:
        yield cast(DriverProcess, manager)
    finally:
        manager.shutdown()


def samples(reading: Reading | NoData) -> dict[tuple[str, ...], float]:
    """The values of a reading by metric name and label values."""
    assert isinstance(reading, Reading), reading
    return {(sample.metric.name, *sample.labels): sample.value for sample in reading.samples}


def of_gpu(got: Mapping[tuple[str, ...], float], gpu: int) -> dict[tuple[str, ...], float]:
    """The series of one GPU without the labels that say which."""
    mine = {key: value for key, value in got.items() if key[1:2] == (str(gpu),)}

    def rest(name: str, *labels: str) -> tuple[str, ...]:
        return () if name == "opsd_gpu_info" else labels[7 if name.startswith("DCGM") else 2 :]

    return {(key[0], *rest(*key)): value for key, value in mine.items()}


def facts(reading: Reading | NoData) -> list[GpuFact]:
    """The GPUs of a reading."""
    assert isinstance(reading, Reading)
    return [fact for fact in reading.facts if isinstance(fact, GpuFact)]


# A device file that counts as a GPU's where no driver is loaded.


def gpu_device(proc: Path) -> str:
    """The name of a device file of everybody's, whose number has the driver of the procfs below ``proc``."""
    (proc / "devices").write_text(
        "Character devices:\n  1 nvidia\n  4 tty\n195 nvidiactl\n\nBlock devices:\n  5 nvidia\n"
    )
    return "/dev/zero"
