"""Xids from the driver, and who is first to tell of them."""

from __future__ import annotations

from typing import Any

from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.nvml import DriverProcess, facts, samples


def test_an_xid_is_an_event_once(gpus: SimulatedGpus, collector: Any) -> None:
    """Also that of a GPU which has fallen off the bus; dcgm-exporter's gauge shows the last one."""
    gpus[7].raise_xid(13)  # before anybody listened
    assert collector.collect().events == ()
    gpus[7].raise_xid(94)
    gpus[7].raise_xid(79)
    gpus[7].lost = True
    reading = collector.collect()
    assert [event.data["code"] for event in reading.events] == [94, 79]
    where = {"pci_bus_id": facts(reading)[7].pci_bus_id, "gpu": 7, "uuid": gpus[7].uuid}
    assert where.items() <= reading.events[0].data.items()
    assert samples(reading)["opsd_xid_total", where["pci_bus_id"], "94"] == 1
    reading = collector.collect()
    assert reading.events == ()
    assert [v for k, v in samples(reading).items() if k[:2] == ("DCGM_FI_DEV_XID_ERRORS", "7")] == [79]


def test_the_kernel_log_is_given_time_to_tell_of_an_xid_first(
    gpus: SimulatedGpus, process: DriverProcess, library: str
) -> None:
    """It knows more; what it does not tell of within a collection comes from the driver, with the time it was seen."""
    collector = process.BesideKernelLog(library)
    first = collector.collect()
    assert not [name for name, *_ in samples(first) if name == "opsd_xid_total"]
    gpus[2].raise_xid(31)
    gpus[2].raise_xid(94)
    assert collector.collect().events == ()
    assert collector.kernel_tells(31, facts(first)[2].pci_bus_id)
    (event,) = collector.collect().events
    assert (event.data["code"], event.data["source"]) == (94, "nvml")
    assert not collector.kernel_tells(94, facts(first)[2].pci_bus_id)
    reading = collector.collect()
    assert reading.events == ()
    assert [v for k, v in samples(reading).items() if k[:2] == ("DCGM_FI_DEV_XID_ERRORS", "2")] == [94]
