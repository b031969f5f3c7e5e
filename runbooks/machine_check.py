"""Main memory or a processor of the node reports errors: EDAC, machine checks, the firmware's error records."""

from __future__ import annotations

from collections.abc import Callable

from opsd.collectors.base import Event
from opsd.runbooks.base import View
from opsd.runbooks.lib.kernel_faults import DAY_S, HOUR_S, Row, has, kernel_runbook

STORM = 100
"""Corrected errors within an hour. A single one is what ECC is for."""

SAME_RECORD_S = 1.0
"""Between the first and the last line of one record of the firmware; numbers begin again with each boot."""

UNCORRECTED = has("severity", "UE", "Uncorrected", "Deferred", "recoverable", "fatal")
CORRECTED = has("severity", "CE", "Corrected", "corrected")


SAME_ERROR_S = 5.0
"""Between the lines of the processor, the firmware and EDAC about one uncorrected error of memory."""


def _named_elsewhere(view: View) -> Callable[[Event], bool]:
    """Records of the firmware that name a PCIe device, which ``pcie_error`` has, and errors whose DIMM EDAC names."""
    devices = [event for event in view.events("pcie_error", DAY_S) if "record" in event.data]
    modules = [
        event.at for event in view.events("edac", DAY_S) if UNCORRECTED(event.data) and event.data.get("location")
    ]

    def named(event: Event) -> bool:
        return any(
            event.data.get("record") == other.data["record"] and abs(event.at - other.at) < SAME_RECORD_S
            for other in devices
        ) or (
            event.kind == "mce" and UNCORRECTED(event.data) and any(abs(event.at - at) < SAME_ERROR_S for at in modules)
        )

    return named


ROWS = (
    Row("edac", "memory errors of {location} that cannot be corrected", UNCORRECTED, "location", critical=True),
    Row("mce", "an uncorrected hardware error", UNCORRECTED, critical=True),
    Row("edac", "a storm of corrected memory errors of {location}", CORRECTED, "location", STORM, HOUR_S),
    Row("mce", "a storm of corrected hardware errors", CORRECTED, "", STORM, HOUR_S),
)

RUNBOOK = kernel_runbook(
    ROWS,
    advice=": have the memory module or the processor replaced",
    ignored=_named_elsewhere,
    cost="a process that uses the memory is killed, or the node panics",
)
