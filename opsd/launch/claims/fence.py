"""The fence around the checkpoints of a run: claims of generations in its folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from opsd.checkpoints import lease
from opsd.client import process_start
from opsd.launch.ranks.settings import Settings


@dataclass(frozen=True, slots=True)
class FolderFence:
    """Claims generations in the run's ``folder`` for ``owner``, who is the same for all that belong together."""

    folder: Path
    owner: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_job(cls, folder: Path, settings: Settings, start: str) -> FolderFence:
        """For the launchers of one ``start`` of a job: any of them may be head."""
        return cls(folder, {**_names(settings), lease.START: start})

    @classmethod
    def of_launcher(cls, folder: Path, settings: Settings) -> FolderFence:
        """For this launcher alone."""
        launcher = f"{os.getpid()}-{process_start(os.getpid())}"
        return cls(folder, {**_names(settings), lease.LAUNCHER: launcher})

    def claim(self, number: int) -> bool:
        """See ``Fence.claim``."""
        return lease.claim(self.folder, number, self.owner)

    def check(self, number: int) -> None:
        """See ``WatchedFence.check``."""
        lease.Fence(self.folder, number).check()

    def overtaken(self) -> bool:
        """See ``Fence.overtaken``."""
        return lease.overtaken(self.folder, self.owner.get(lease.START, ""))


def _names(settings: Settings) -> dict[str, str]:
    return {"run": settings.run, "job": settings.job, "node": settings.node}
