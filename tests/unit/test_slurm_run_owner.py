"""Which claim of a run a new start may replace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from opsd import exitcodes
from opsd.checkpoints import claims
from opsd.checkpoints.claims import Claim
from opsd.slurm.port import Job, SlurmUnavailable
from opsd.slurm.run_owner import RunOwnedError, replaceable

OWN = "train, job 72.0, ab"


def job(state: str) -> Job:
    """Job 71 in this state."""
    return Job(71, state, "", "ada", "train", ("n1",), "n1", None, None, None, 0, "train")


class Scene:
    """A folder with one claim, and a clock by which the owner renews its lease until ``lives_s``."""

    def __init__(self, folder: Path, start: str, plan: dict[str, Any], lives_s: float) -> None:
        self.folder, self.lives_s, self.now = folder, lives_s, 0.0
        claims.create(folder, Claim(1, start, "n1-1-ab", plan=plan))

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        if self.now < self.lives_s:
            claims.renew(self.folder, 1, int(self.now))

    def replaceable(self, state: str, *, take_over: bool = False) -> int:
        """What a start of job 72 finds; ``state`` is that of job 71, "" if Slurm does not know it."""

        def jobs(_: Sequence[int]) -> Sequence[Job]:
            if state == "no answer":
                raise SlurmUnavailable("the controller is down")
            return [job(state)] if state else []

        return replaceable(self.folder, OWN, jobs, take_over=take_over, clock=lambda: self.now, sleep=self.sleep)


OTHER = "train, job 71.0, cd"
REQUEUED, DONE = ({"end": {"code": code, "reason": ""}} for code in (exitcodes.REQUEUE, 0))


@pytest.mark.parametrize(
    ("start", "plan", "state", "lives_s"),
    [
        (OTHER, {}, "running", 0.0),
        (OTHER, {}, "pending", 0.0),
        (OTHER, {}, "no answer", 1e9),
        (OTHER, {}, "", 1e9),
        (OTHER, {}, "completing", 1e9),
        (OTHER, REQUEUED, "pending", 0.0),
        ("train, n1 at n1:29480", {}, "", 1e9),
        ("train, job 72.0, cd", {}, "", 1e9),
    ],
)
def test_a_living_owner_keeps_the_run(
    tmp_path: Path, start: str, plan: dict[str, Any], state: str, lives_s: float
) -> None:
    """Slurm shows its job, or its lease is renewed; only an explicit word takes the run over."""
    with pytest.raises(RunOwnedError, match="--take-over"):
        Scene(tmp_path, start, plan, lives_s).replaceable(state)
    assert Scene(tmp_path, start, plan, lives_s).replaceable(state, take_over=True) == 1


@pytest.mark.parametrize(
    ("start", "plan", "state", "lives_s"),
    [
        (OTHER, {}, "", 0.0),
        (OTHER, {}, "no answer", 0.0),
        (OTHER, {}, "completing", 20.0),
        (OTHER, DONE, "running", 1e9),
        (OTHER, REQUEUED, "", 0.0),
        (OWN, {}, "running", 1e9),
        ("train, job 72.0, ab, n1-1-ab", {}, "running", 1e9),
        ("train, n1 at n1:29480", {}, "", 0.0),
    ],
)
def test_a_run_without_a_living_owner_is_replaced(
    tmp_path: Path, start: str, plan: dict[str, Any], state: str, lives_s: float
) -> None:
    """It has ended, its lease does not change any more, or it is of the same start."""
    assert Scene(tmp_path, start, plan, lives_s).replaceable(state) == 1


def test_a_requeued_job_replaces_its_earlier_start_at_once(tmp_path: Path) -> None:
    """Also while a launcher of that start, cut off on its node, renews the lease."""
    scene = Scene(tmp_path, "train, job 72.0, cd", {}, 1e9)
    assert replaceable(tmp_path, "train, job 72.1, ab", lambda _: [], sleep=scene.sleep) == 1
    assert replaceable(tmp_path / "new", OWN, lambda _: []) == 0
