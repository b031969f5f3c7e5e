"""Size of the network file systems, and how long each took to tell.

Hangs while a server does not answer; asked rarely, because every node of a cluster asks the same servers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import Field

from opsd.collectors.base import NoData, Plugin, Reading, Sample
from opsd.collectors.lib import storage as series
from opsd.collectors.lib.storage import MAX_MOUNTS, Mount, read_mounts, storage_mounts, way_to
from opsd.settings.sections import CollectorSettings


class StorageNetSettings(CollectorSettings):
    """Network file systems, asked for their size and watched how long it takes."""

    interval_s: float = Field(default=5.0, ge=0, le=3600, description="Seconds between two questions to a server.")


class StorageNetCollector:
    """The mounts of networks in ``proc``. Left out are those that may not be entered, and those that users have made.

    A user's mount (FUSE) says nothing about the node, and may never answer.

    ``only`` restricts it to some mount points: one collector for each, with a ``name`` of its own, shows which of them
    hangs.
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
        table = read_mounts(self._proc)
        mounts = [mount for mount in storage_mounts(table) if mount.network and not _leads_to_a_user(mount, table)]
        if self._only:
            mounts = [mount for mount in mounts if mount.point in self._only]
        if not mounts:
            return NoData("no network file system is mounted")
        return Reading(tuple(sample for mount in mounts[:MAX_MOUNTS] for sample in self._ask(mount)))

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


def _leads_to_a_user(mount: Mount, mounts: Sequence[Mount]) -> bool:
    return mount.by_user or any(passed.by_user for passed in way_to(mount, mounts))


COLLECTOR = Plugin(
    "storage_net",
    StorageNetSettings,
    lambda settings, _context: StorageNetCollector(interval_s=settings.interval_s),
    series.MOUNT_LABEL,
)
