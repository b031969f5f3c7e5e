"""The client of a shared file system has lost data in flight, or Lustre's has crashed."""

from __future__ import annotations

from opsd.runbooks.lib.kernel_faults import HOUR_S, Row, kernel_runbook

ROWS = (
    Row("network_filesystem_crashed", "the Lustre client has crashed ({cause})", critical=True),
    Row("network_filesystem_evicted", "{server} has evicted the client ({fs})", about="server", within_s=HOUR_S),
)

RUNBOOK = kernel_runbook(
    ROWS,
    component="storage",
    beside="network_filesystem_error",
    advice=": verify what was being written at that time",
    cost="reads and writes in flight have failed",
    first=("journalctl -k --since -1hour",),
)
