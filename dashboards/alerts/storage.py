"""Alerts about file systems, those of the node and those that nodes share."""

from __future__ import annotations

from opsd.dashboards.alerts.model import Alert, Group, incident

_SHARED = "opsd_storage_reachable"
"""Only network file systems have this series."""
_WRITABLE = "unless on (cluster, instance, mount) opsd_storage_read_only == 1"


def _full(scope: str, which: str) -> str:
    """File systems that are nearly full by the runbook's rule: small share free, and few GiB or inodes free."""
    on_mount = f"on ({scope}, mount)"
    counted = f"max by ({scope}, mount) (\n  ({{}})\n  {which}\n  {_WRITABLE}\n)"
    share = counted.format(
        "opsd_host_filesystem_available_bytes / opsd_host_filesystem_size_bytes or "
        "opsd_storage_available_bytes / opsd_storage_size_bytes"
    )
    left = counted.format("opsd_host_filesystem_available_bytes or opsd_storage_available_bytes")
    inodes = counted.format(
        "opsd_host_filesystem_inodes_free / opsd_host_filesystem_inodes or "
        "opsd_storage_inodes_free / opsd_storage_inodes"
    )
    return f"{share} < 0.05\nand {on_mount}\n{left} < 100 * 2 ^ 30\nor\n{inodes} < 0.05"


STORAGE = Group(
    "storage",
    (
        Alert(
            "StorageFull",
            incident("storage_full"),
            summary="A file system of {{ $labels.instance }} is nearly full",
            description="The next checkpoint may not fit. If it is shared memory, data loaders crash.",
        ),
        Alert(
            "StorageFull",
            _full("cluster", f"and on (cluster, instance, mount) {_SHARED}"),
            scope="cluster",
            severity="critical",
            hold="1m",
            summary="{{ $labels.mount }} has {{ $value | humanizePercentage }} left",
            description="A network file system; one alert for all its nodes. The next checkpoint may not fit.",
            cost="Every run that writes there will lose its checkpoints.",
        ),
        Alert(
            "StorageSlow",
            incident("storage_slow"),
            summary="Storage of {{ $labels.instance }} is slow",
            description="A disk or a file system responds far more slowly than before.",
        ),
    ),
)
