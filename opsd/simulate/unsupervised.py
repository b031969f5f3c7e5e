"""A job without opsd: torchrun, a batch script that requeues itself, and Slurm with its own settings.

Modelled, and kindly: somebody drains each faulty node before the job is back, and the same checkpoints are made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from opsd.simulate.faults import Fault
from opsd.simulate.job import Job


class UnsupervisedJob(Job):
    """All ranks end with any node of the job."""

    def launch(self, names: list[str]) -> None:
        """See ``Job.launch``."""
        self._begin_after(self.world.times.torchrun_restart_s + self.world.times.program_s)

    @property
    def ranked(self) -> Collection[str]:
        """See ``Job.ranked``."""
        return self.held

    @property
    def places(self) -> Sequence[str]:
        """See ``Job.places``."""
        return sorted(self.held)

    def _begin_after(self, delay_s: float) -> None:
        self.start += 1
        loop, start = self.world.loop, self.start
        self.world.account.idle(loop.time(), "restart")

        def loaded() -> None:
            if start != self.start:
                return
            if (left_s := self.without_storage()) > 0:
                loop.later(left_s, loaded)
            else:
                self.compute(1.0)

        loop.later(delay_s, loaded)

    def stop(self) -> None:
        """Nothing of torchrun outlives its job."""

    def fault(self, name: str, fault: Fault) -> None:
        """See ``Job.fault``."""
        account, times = self.world.account, self.world.times
        if name not in self.held or fault.effect == "degraded":
            return
        account.idle(self.world.loop.time(), "detection", fault.kind)
        if fault.effect in ("process", "link"):
            self._begin_after(times.torchrun_restart_s + times.program_s)
            return
        if fault.effect == "hang":
            self.start += 1
            hung = self.start
            ended_s = times.torchrun_restart_s + times.program_s
            self.world.loop.later(
                times.torchrun_hang_s, lambda: self._begin_after(ended_s) if hung == self.start else None
            )
            return
        noticed_s = times.slurm_notices_s if fault.effect == "lost" else times.torchrun_dies_s
        self.start += 1
        self.held = set()
        start = self.start

        def ended() -> None:
            if start == self.start:
                self.avoid(tuple(self.world.cluster.broken), math.inf)
                self.requeue(times.slurm_delay_s)

        self.world.loop.later(noticed_s, ended)
