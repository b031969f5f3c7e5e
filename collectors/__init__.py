"""Collectors: one file per source of metrics. ``NAMES`` is where they are registered.

The modules of this folder are the plug-ins, but for ``base``, which says what a collector is. ``lib`` has what they are
made of.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opsd.collectors.base import Plugin

NAMES = (
    "dcgm",
    "nvml",
    "imex",
    "kmsg",
    "host",
    "thermal",
    "infiniband",
    "storage",
    "storage_net",
    "nvme",
    "slurm",
    "jobs",
    "ranks",
    "nccl",
    "spare",
    "repairs",
    "prolog",
)
"""Every collector, in the order of the configuration file."""


@cache
def plugins() -> tuple[Plugin[Any], ...]:
    """Every collector as it is registered."""
    return tuple(import_module(f"{__name__}.{name}").COLLECTOR for name in NAMES)


def witnesses() -> frozenset[str]:
    """The names of the collectors whose sources are the kernel and drivers."""
    return frozenset(plugin.name for plugin in plugins() if plugin.witness)
