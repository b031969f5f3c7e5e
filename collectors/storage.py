"""Disks, mounts, NFS operations and the page cache. Nothing here waits for another machine.

``StorageNetCollector`` asks network file systems for their size. That waits as long as a server is away, so it is a
collector of its own: while it hangs, this one still tells what the kernel knows about the mount.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from opsd.collectors.base import NoData, Reading, Sample
from opsd.collectors.lib.storage import series
from opsd.collectors.lib.storage.mounts import Mount, parse_mountinfo, parse_mountstats, storage_mounts

_MAX_DISKS: Final = 64
_MAX_MOUNTS: Final = 64


def _default_paths() -> Iterable[str]:
    return ("/", "/dev/shm")  # noqa: S108  # only their sizes are read


class StorageCollector:
    """The storage behind ``proc`` and ``sys``; 64 disks and 64 mounts at most.

    ``paths`` names folders whose mounts matter whatever their type is, for instance those of the runs on this node;
    absolute and without symbolic links.
    """

    name = "storage"
    metrics = (
        *series.DISK_METRICS, series.MOUNT_INFO, series.READ_ONLY, *series.SPACE_METRICS, *series.NFS_METRICS,
        *series.CACHE_METRICS,
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
        samples = [*self._disks(), *series.cache((self._proc / "vmstat").read_text(encoding="ascii"))]
        for mount in _mounts(self._proc, self._paths())[:_MAX_MOUNTS]:
            disk = "" if mount.network else self._disk_of(mount)
            info = (mount.point, mount.fstype, mount.source, disk, mount.options)
            samples += [
                Sample(series.MOUNT_INFO, 1, info),
                Sample(series.READ_ONLY, float(mount.read_only), (mount.point,)),
            ]
            if not mount.network:
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
            text = (self._proc / "self/mountstats").read_text(encoding="utf-8", errors="replace")
            for mount in parse_mountstats(text)[:_MAX_MOUNTS]:
                yield from self._totals.nfs(mount)


class StorageNetCollector:
    """Size of the network file systems, and how long each took to tell.

    Hangs while a server does not answer; asked seldom, because every node of a cluster asks the same servers. ``only``
    restricts it to some mount points: one collector for each, with a ``name`` of its own, shows which of them hangs. A
    mount that may not be entered is left out.
    """

    name: str
    metrics = (*series.SPACE_METRICS, series.REACHABLE, series.RESPONSE)

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        only: Sequence[str] = (),
        name: str = "storage_net",
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
    ) -> None:
        self.name = name
        self.interval_s = interval_s
        self._proc = proc
        self._only = only
        self._clock = clock
        self._statvfs = statvfs

    def collect(self) -> Reading | NoData:
        """Ask every network file system, 64 at most. Raises OSError if ``proc`` is not there."""
        mounts = [mount for mount in _mounts(self._proc) if mount.network]
        if self._only:
            mounts = [mount for mount in mounts if mount.point in self._only]
        if not mounts:
            return NoData("no network file system is mounted")
        return Reading(tuple(sample for mount in mounts[:_MAX_MOUNTS] for sample in self._ask(mount)))

    def _ask(self, mount: Mount) -> Iterator[Sample]:
        asked = self._clock()
        try:
            status = self._statvfs(mount.point)
        except PermissionError:
            return
        except OSError:  # a stale handle, a file system process that has died
            yield Sample(series.REACHABLE, 0, (mount.point,))
            return
        yield Sample(series.REACHABLE, 1, (mount.point,))
        yield Sample(series.RESPONSE, self._clock() - asked, (mount.point,))
        yield from series.space(mount, status)


def _mounts(proc: Path, paths: Iterable[str] = ()) -> list[Mount]:
    text = (proc / "self/mountinfo").read_text(encoding="utf-8", errors="replace")
    return storage_mounts(parse_mountinfo(text), paths)
