"""Disks, mounts, NFS operations and the page cache. Nothing here waits for another machine.

``storage_net`` asks network file systems for their size. That waits as long as a server is away, so it is a separate
collector. While it hangs, this one still reports the kernel's view of the mount.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from opsd.collectors.base import Collector, Context, Plugin, Reading, Sample
from opsd.collectors.host import HostSettings
from opsd.collectors.lib import storage as series
from opsd.collectors.lib.processes import read_kernel_text
from opsd.collectors.lib.storage import MAX_MOUNTS, Mount, parse_mountstats, read_mounts, storage_mounts, way_to
from opsd.collectors.ranks import RanksCollector
from opsd.settings.sections import CollectorSettings

_MAX_DISKS: Final = 64


def _default_paths() -> Iterable[str]:
    return ("/", "/dev/shm")  # noqa: S108  # only their sizes are read


class StorageSettings(CollectorSettings):
    """Disks, mounts, NFS clients and the page cache, as the kernel sees them."""


class StorageCollector:
    """The storage behind ``proc`` and ``sys``; 64 disks and 64 mounts at most.

    ``paths`` names folders whose mounts matter whatever their type is, for instance those of the runs on this node;
    absolute and without symbolic links.
    """

    name = "storage"
    metrics = (
        *series.DISK_METRICS, series.ARRAY_MISSING, series.MOUNT_INFO, series.READ_ONLY, *series.SPACE_METRICS,
        *series.NFS_METRICS, *series.CACHE_METRICS,
    )  # fmt: skip

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        paths: Callable[[], Iterable[str]] = _default_paths,
    ) -> None:
        self._proc = proc
        self._sys = sys
        self._paths = paths
        self._totals = series.Totals()

    def collect(self) -> Reading:
        """Look once. Raises OSError if ``proc`` is not there."""
        samples = [*self._disks(), *self._arrays(), *series.cache((self._proc / "vmstat").read_text(encoding="ascii"))]
        mounts = read_mounts(self._proc)
        for mount in storage_mounts(mounts, self._paths())[:MAX_MOUNTS]:
            disk = "" if mount.network else self._disk_of(mount)
            info = (mount.point, mount.fstype, mount.source, disk, mount.options)
            samples += [
                Sample(series.MOUNT_INFO, 1, info),
                Sample(series.READ_ONLY, float(mount.read_only), (mount.point,)),
            ]
            if not (mount.network or way_to(mount, mounts)):
                with contextlib.suppress(OSError):  # unmounted meanwhile, or in a folder that may not be entered
                    samples += series.space(mount, os.statvfs(mount.point))
        samples += self._nfs()
        return Reading(tuple(samples))

    def _disks(self) -> Iterator[Sample]:
        with contextlib.suppress(FileNotFoundError):  # no block devices at all
            folders = sorted(folder for folder in (self._sys / "block").iterdir() if series.is_disk(folder.name))
            for folder in folders[:_MAX_DISKS]:
                with contextlib.suppress(OSError):  # removed meanwhile
                    stat = series.parse_disk_stat((folder / "stat").read_text(encoding="ascii"))
                    yield from self._totals.disk(folder.name, stat)

    def _arrays(self) -> Iterator[Sample]:
        with contextlib.suppress(FileNotFoundError):  # a kernel without software RAID
            for array, missing in series.parse_mdstat((self._proc / "mdstat").read_text(encoding="utf-8")).items():
                yield Sample(series.ARRAY_MISSING, missing, (array,))

    def _disk_of(self, mount: Mount) -> str:
        """The disk under a mount by its name in /sys/block, or "" if there is none."""
        by_name = Path(mount.source).name if mount.source.startswith("/dev/") else mount.device
        for link in (self._sys / "dev/block" / mount.device, self._sys / "class/block" / by_name):
            if link.exists():
                folder = link.resolve()
                return folder.parent.name if (folder / "partition").exists() else folder.name
        return ""

    def _nfs(self) -> Iterator[Sample]:
        with contextlib.suppress(FileNotFoundError):  # a kernel without NFS
            for mount in parse_mountstats(read_kernel_text(self._proc / "self/mountstats"))[:MAX_MOUNTS]:
                yield from self._totals.nfs(mount)


def _make(settings: StorageSettings, context: Context) -> Collector:
    def paths() -> Iterable[str]:
        """The mounts of the settings and the folders of the runs on this node."""
        ranks = context.collector(RanksCollector)
        return (*map(str, context.settings.section(HostSettings).mounts), *(ranks.folders if ranks else ()))

    return StorageCollector(paths=paths)


COLLECTOR = Plugin("storage", StorageSettings, _make, {**series.MOUNT_LABEL, **series.DISK_LABELS})
