"""Alerts about file systems, those of the node and those that nodes share."""

from __future__ import annotations

from opsd.dashboards.alerts.model import Alert, Group, incident

_OF_SHARED = 'opsd_incidents{kind="storage_full", mount!="", '


def _shared(severity: str) -> str:
    mine = f'{_OF_SHARED}severity="{severity}", state!~"acknowledged|symptom"}}'
    return f"max by (cluster, mount, severity) ({mine}) > 0"


_SHARED = f"""
(
  {_shared("critical")}
  or on (cluster, mount)
  {_shared("warning")}
)
unless on (cluster, mount) {_OF_SHARED}state="acknowledged"}} > 0
"""
"""Network file systems with an incident on any node, by the gravest; not one that somebody has on any node."""


STORAGE = Group(
    "storage",
    (
        Alert(
            "StorageFull",
            incident("storage_full", 'mount=""'),
            summary="A file system of {{ $labels.instance }} is nearly full",
            description="The next checkpoint may not fit. If it is shared memory, data loaders crash.",
        ),
        Alert(
            "StorageFull",
            _SHARED,
            scope="cluster",
            summary="{{ $labels.mount }} is nearly full",
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
