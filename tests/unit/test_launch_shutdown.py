"""The exit of the leader: who ends the job of the run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opsd.launch.run.shutdown import Shutdown


class Job:
    """A batch job whose host dies, or does not, before the launcher exits: ``orphaned`` has the next answers."""

    def __init__(self, *orphaned: bool) -> None:
        self.asked: list[tuple[int, tuple[str, ...]]] = []
        self._orphaned = list(orphaned)

    def end(self, code: int, lost: tuple[str, ...], unfit: tuple[str, ...]) -> bool:
        """See ``BatchJob.end``."""
        self.asked.append((code, lost))
        return self._orphaned.pop(0)


class Loop:
    """Does all at once."""

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Nothing comes later."""

    def run_in_thread(self, work: Callable[[], bool], done: Callable[[bool], None]) -> None:
        """Here and now."""
        done(work())


@pytest.mark.parametrize(("orphaned", "asks"), [((False, False), 2), ((False, True), 2), ((True,), 1)])
def test_the_batch_host_is_looked_at_again_at_the_very_end(orphaned: tuple[bool, ...], asks: int) -> None:
    """It may die while the report is made. A job that was ended is not ended again."""
    job, finished = Job(*orphaned), list[tuple[int, str]]()
    node = SimpleNamespace(loop=Loop(), finish=lambda code, reason: finished.append((code, reason)))
    shutdown = Shutdown(cast(Any, node), cast(Any, SimpleNamespace(alive={})), job, lambda: None)
    shutdown.over(0, "all ranks finished", ("n2",), ())
    shutdown.leave(0, "all ranks finished")
    assert finished == [(0, "all ranks finished")]
    shutdown.last_look()
    assert job.asked == [(0, ("n2",))] * asks


def test_a_launcher_that_does_not_lead_asks_for_nothing() -> None:
    """The job's end is the leader's."""
    job, finished = Job(), list[int]()
    node = SimpleNamespace(loop=Loop(), finish=lambda code, reason: finished.append(code))
    shutdown = Shutdown(cast(Any, node), cast(Any, SimpleNamespace(alive={})), job, lambda: None)
    shutdown.leave(0, "all ranks finished")
    shutdown.last_look()
    assert (finished, job.asked) == ([0], [])
