"""The batch script of a run: which signals it passes on, and what it does at the end."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.checkpoints import claims
from opsd.checkpoints.claims import Claim
from opsd.slurm.allocation import allocation
from opsd.slurm.batch import POLL_S, Batch
from opsd.slurm.port import Node
from opsd.slurm.run_outcome import LEASE_GRACE_S, LEASE_TIMEOUT_S, MISSING_LAUNCHER_S
from tests.fakes.clock import FakeClock
from tests.fakes.requeue import FakeQueue, running

JOB = allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1"})
START = "train, job 7.0"


class FakeSteps:
    """Launchers that leave when they are told to: ``codes`` are those that have."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.signals: list[signal.Signals] = []
        self.abandoned: frozenset[str] = frozenset()

    @property
    def left(self) -> frozenset[str]:
        return frozenset(JOB.nodes) - self.codes.keys()

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def abandon(self) -> None:
        self.abandoned = self.left


class Scene:
    """A batch script at work; ``then`` are what happens, one thing each time that it sleeps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.steps, self.said = folder, FakeClock(), FakeSteps(), list[str]()
        self.slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2", "n3", "n4")], running(*JOB.nodes))
        self.then: list[Callable[[], object]] = []
        self.begin()

    def begin(self, needs: int = 1, start: str = START) -> None:
        """Another ``opsd slurm run``, in the same start of the job."""
        self.start = start
        self.batch = Batch(
            self.folder, start, JOB, lambda: self.slurm, needs,
            clock=self.clock.monotonic, sleep=self._sleep, say=self.said.append,
        )  # fmt: skip

    def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        assert self.clock.monotonic() < 3600, "it does not end"
        if self.then:
            self.then.pop(0)()

    def ends(self, code: int, **more: object) -> None:
        """The run says how it has ended, and its launchers leave."""
        plan = {"end": {"code": code, "reason": "all is said"} | more}
        claims.create(self.folder, Claim(claims.newest_number(self.folder) + 1, self.start, "n1.1", plan=plan))
        self.steps.codes = dict.fromkeys(JOB.nodes, code)

    def run(self, *then: Callable[[], object]) -> int:
        """The exit code of the batch script."""
        self.then = list(then)
        return self.batch.run(self.steps)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A run that goes on."""
    return Scene(tmp_path)


@pytest.mark.parametrize("code", [exitcodes.OK, exitcodes.FAILED, exitcodes.REPEATED, exitcodes.FENCED])
def test_the_jobs_end_is_the_runs(scene: Scene, code: int) -> None:
    """Nothing is asked of Slurm."""
    assert scene.run(lambda: scene.ends(code)) == code
    assert scene.slurm.calls == []


def test_an_earlier_end_in_the_same_start_of_the_job_is_not_this_ones(scene: Scene) -> None:
    """A script may train twice, and a user in salloc may start what ended with 75 again."""
    scene.ends(exitcodes.OK)
    scene.begin(start="train, job 7.0, second")
    scene.steps.codes = {}
    goes_on = [lambda: None] * 150
    assert scene.run(*goes_on, lambda: scene.ends(exitcodes.FAILED)) == exitcodes.FAILED
    assert scene.clock.monotonic() > 150 * POLL_S


def test_the_jobs_end_of_a_second_command_is_what_its_launchers_say(scene: Scene) -> None:
    """They did not begin the run; that an earlier one did says nothing of them."""
    claims.create(scene.folder, Claim(1, START, "n1.1"))
    scene.begin(start="train, job 7.0, second")
    scene.steps.codes = dict.fromkeys(JOB.nodes, exitcodes.FAILED)
    assert scene.run() == exitcodes.FAILED
    assert scene.slurm.submitted == []


def test_a_run_that_is_to_go_on_is_requeued_without_what_it_lost(scene: Scene) -> None:
    """The script ends with 0: what ends with another code is held by some releases of Slurm."""
    assert scene.run(lambda: scene.ends(exitcodes.REQUEUE, lost=["n2", "n9"], unfit=["n3"])) == exitcodes.OK
    assert scene.slurm.calls == ["drain n2", "down n2", "requeue"]
    assert "--exclude=n[2-3]" in scene.slurm.submitted[0][1]


def test_a_start_on_a_dead_node_ends_without_it(scene: Scene) -> None:
    """The others would wait ten minutes for its launcher. Such starts are not counted: the run has done nothing."""
    for _ in range(4):
        scene.slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2", "n3", "n4")], running(*JOB.nodes))
        scene.begin(needs=3)
        scene.steps.codes = {"n2": 233}
        began = scene.clock.monotonic()
        assert scene.run() == exitcodes.OK
        assert scene.slurm.calls == ["drain n2", "down n2", "requeue"]
        assert MISSING_LAUNCHER_S <= scene.clock.monotonic() - began < MISSING_LAUNCHER_S + 10.0
    assert any("no launcher could be started on n2" in sentence for sentence in scene.said)


def test_a_start_with_a_node_of_no_use_ends_without_it(scene: Scene) -> None:
    """A port that is taken, no GPU, no file system: the others would wait ten minutes. Three times it is tried."""
    codes = []
    for code in (exitcodes.FAILED, exitcodes.USAGE, exitcodes.NOT_FOUND):
        scene.slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2", "n3", "n4")], running(*JOB.nodes))
        scene.begin(needs=3)
        scene.steps.codes = {"n2": code}
        codes.append(scene.run())
    assert codes == [exitcodes.OK, exitcodes.OK, exitcodes.FAILED]
    assert any("the launcher of n2 ended with 127; 3 are needed and 2 are there" in sentence for sentence in scene.said)
    assert "start 3 in a row without an outcome and without progress" in scene.said[-1]


def test_a_node_of_no_use_is_avoided(scene: Scene) -> None:
    """It is neither drained nor taken down: what is wrong there may be the run's own fault."""
    scene.begin(needs=3)
    scene.steps.codes = {"n2": exitcodes.FAILED}
    assert scene.run() == exitcodes.OK
    assert scene.slurm.calls == ["requeue"]
    assert "--without=n2" in scene.slurm.submitted[0][0]


@pytest.mark.parametrize("code", [exitcodes.FENCED, exitcodes.INTERRUPTED])
def test_who_left_for_a_reason_of_the_run_is_not_missing(scene: Scene, code: int) -> None:
    """Another copy has begun, or its user has interrupted a launcher: the others will say what comes of it."""
    scene.begin(needs=3)
    scene.steps.codes = {"n2": code}
    assert scene.run(*[lambda: None] * 200, lambda: scene.ends(exitcodes.OK)) == exitcodes.OK


def test_a_start_that_has_enough_nodes_goes_on_without_the_dead_one(scene: Scene) -> None:
    """The launchers that are there begin without it."""
    scene.begin(needs=2)
    scene.steps.codes = {"n2": 233}
    assert scene.run(*[lambda: None] * 200, lambda: scene.ends(exitcodes.OK)) == exitcodes.OK


def test_a_run_that_has_begun_sees_to_its_nodes_itself(scene: Scene) -> None:
    """It may wait for a spare."""
    scene.begin(needs=3)
    claims.create(scene.folder, Claim(1, START, "n1.1"))
    scene.steps.codes = {"n2": 233}
    assert scene.run(*[lambda: None] * 200, lambda: scene.ends(exitcodes.OK)) == exitcodes.OK


def test_nobody_waits_for_the_step_of_a_dead_node(scene: Scene) -> None:
    """Its srun would cancel a step of that number later, which may then be one of the next start."""

    def end() -> None:
        scene.ends(exitcodes.REQUEUE, lost=["n2"])
        del scene.steps.codes["n2"]

    assert scene.run(end) == exitcodes.OK
    assert scene.steps.abandoned == {"n2"}


def test_a_job_that_is_cancelled_is_not_requeued(scene: Scene) -> None:
    """Its launchers have saved and said 75."""

    def cancel() -> None:
        scene.slurm.job = replace(scene.slurm.job, state="completing")
        scene.ends(exitcodes.REQUEUE)

    assert scene.run(cancel) == exitcodes.REQUEUE
    assert (scene.slurm.calls, scene.slurm.submitted) == ([], [])


def hurry(
    scene: Scene,
    *,
    step: int = 0,
    last_s: float = 10.0,
    reason: str = "stopped after SIGUSR1",
    state: str = "running",
) -> int:
    """One more start of the job, which is told to stop; the exit code of its batch script."""
    job = replace(running(*JOB.nodes), state=state, restarts=1 if state == "completing" else 0)
    scene.slurm = FakeQueue([Node(name, "idle") for name in JOB.nodes], job)
    scene.steps.codes = {}
    scene.begin(start=f"train, job 7.{claims.newest_number(scene.folder)}")

    def end() -> None:
        with (scene.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "checkpoint_committed", "step": step}) + "\n")
        scene.ends(exitcodes.REQUEUE, reason=reason)

    return scene.run(lambda: scene.clock.advance(last_s), end)


def test_a_job_whose_time_is_up_as_it_starts_does_not_start_for_ever(scene: Scene) -> None:
    """Its limit is not longer than the notice that its script asks for; each start was told to stop at once."""
    assert [hurry(scene) for _ in range(3)] == [exitcodes.OK, exitcodes.OK, exitcodes.FAILED]
    assert scene.slurm.calls == []
    assert (
        "start 3 in a row that was told to stop by SIGUSR1 before it came any further; it is the last" in scene.said[-1]
    )
    assert "is the time limit longer than the notice of --signal" in scene.said[-1]


def test_nor_after_sigterm(scene: Scene) -> None:
    """``--signal=TERM@300`` does the same; but so does a preemption with GraceTime, which may come some times."""
    codes = [hurry(scene, reason="stopped between generations after SIGTERM") for _ in range(10)]
    assert codes == [*[exitcodes.OK] * 9, exitcodes.FAILED]


def test_a_preempted_job_comes_back_however_often(scene: Scene) -> None:
    """Slurm is putting it back into the queue by itself."""
    assert {hurry(scene, state="completing") for _ in range(4)} == {exitcodes.OK}


def test_what_starts_and_stops_with_progress_goes_on(scene: Scene) -> None:
    """So does what lasted longer and tells of no steps, and what stopped for another reason."""
    assert {hurry(scene, last_s=200.0) for _ in range(4)} == {exitcodes.OK}
    assert {hurry(scene, reason="all is said") for _ in range(4)} == {exitcodes.OK}
    assert {hurry(scene, step=step) for step in range(4)} == {exitcodes.OK}


def test_a_program_that_takes_longer_to_begin_than_it_has_does_not_start_for_ever(scene: Scene) -> None:
    """It has told of steps before, so that none is known to have been done."""
    assert hurry(scene, step=7, last_s=200.0) == exitcodes.OK
    assert [hurry(scene, step=7, last_s=200.0) for _ in range(2)] == [exitcodes.OK, exitcodes.FAILED]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_that_reached_the_script_alone_is_passed_on(scene: Scene, number: signal.Signals) -> None:
    """As SIGUSR1, once: SIGTERM has srun kill its task."""
    scene.run(lambda: scene.batch.signals.append(number), lambda: None, lambda: scene.ends(exitcodes.REQUEUE))
    assert scene.steps.signals == [signal.SIGUSR1]


def test_what_slurm_tells_everybody_is_not_passed_on(scene: Scene) -> None:
    """Asked twice, launchers wait less long for their ranks to save."""

    def cancel() -> None:
        scene.slurm.job = replace(scene.slurm.job, state="completing")
        scene.batch.signals.append(signal.SIGTERM)

    scene.run(cancel, lambda: None, lambda: scene.ends(exitcodes.REQUEUE))
    assert scene.steps.signals == []


def test_the_users_interrupt_saves_and_does_not_run_again(scene: Scene) -> None:
    """Twice, and it does not wait for that."""
    interrupt = [lambda: scene.batch.signals.append(signal.SIGINT)] * 2
    assert scene.run(*interrupt, lambda: None, lambda: scene.ends(exitcodes.REQUEUE)) == exitcodes.INTERRUPTED
    assert scene.steps.signals == [signal.SIGUSR1, signal.SIGTERM]
    assert scene.slurm.submitted == []


def test_the_job_lives_as_long_as_borrowed_nodes_carry_the_run(scene: Scene) -> None:
    """All launchers on the job's own nodes are gone; somebody renews the lease for a minute, then says the end."""
    claims.create(scene.folder, Claim(1, START, "n8.1"))

    def leave() -> None:
        scene.steps.codes = {"n1": 0, "n2": 1, "n3": 1}

    beats = [lambda lease=lease: claims.renew(scene.folder, 1, lease) for lease in range(1, 300)]
    assert scene.run(leave, *beats, lambda: scene.ends(exitcodes.OK)) == exitcodes.OK
    assert scene.clock.monotonic() > LEASE_TIMEOUT_S + LEASE_GRACE_S


def test_borrowed_nodes_that_fall_silent_are_given_up(scene: Scene) -> None:
    """Nobody has said how the run has ended: it runs again."""
    claims.create(scene.folder, Claim(1, START, "n8.1"))
    began = scene.clock.monotonic()

    def leave() -> None:
        scene.steps.codes = {"n1": 0, "n2": 1, "n3": 1}

    beats = [lambda lease=lease: claims.renew(scene.folder, 1, lease) for lease in range(1, 5)]
    assert scene.run(leave, *beats) == exitcodes.OK
    assert scene.slurm.calls == ["requeue"]
    assert LEASE_TIMEOUT_S <= scene.clock.monotonic() - began < LEASE_TIMEOUT_S + LEASE_GRACE_S


def test_the_log_of_the_run_is_copied(tmp_path: Path) -> None:
    """From now on; what earlier starts have told stands in the job's log already."""
    (tmp_path / "job.log").write_text("before\n")
    scene = Scene(tmp_path)
    with (tmp_path / "copy").open("wb") as copy:
        scene.batch.log = copy.fileno()

        def tell() -> None:
            with (tmp_path / "job.log").open("a") as file:
                file.write("n2 is lost\nhalf a li")

        scene.run(tell, lambda: scene.ends(exitcodes.OK))
    assert (tmp_path / "copy").read_text() == "n2 is lost\n"
