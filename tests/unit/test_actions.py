"""The executor: it does what it is asked, refuses what nobody may ask for, and never hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from opsd.agent.actions import LANE_THREADS, ActionError, Executor, ancestors
from opsd.agent.lifecycle import Outcome
from opsd.client import Reporter
from opsd.control import ControlError, ask_launcher
from opsd.runbooks.base import Action

RANK = """
import subprocess, sys, time
from opsd.client import Reporter
reporter = Reporter(sys.argv[1], rank=0, run="r")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if sys.argv[2] == "listed":
    reporter.add_worker(child.pid, "data")
print(child.pid, flush=True)
time.sleep(600)
"""


class Told:
    """A notifier that remembers, and fails on demand."""

    def __init__(self, error: Exception | None = None) -> None:
        self.texts: list[str] = []
        self.error = error

    def __call__(self, text: str, fields: Mapping[str, object]) -> None:
        if self.error:
            raise self.error
        self.texts.append(text)


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    (tmp_path / "r").mkdir()
    return tmp_path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


LOWER = Action("set_power_limit", "g", {"gpu": 0, "watts": 500})


def rank(shm: Path, started: list[subprocess.Popen[str]], mode: str = "listed") -> tuple[int, int]:
    """A process that writes a rank page and has a child; their pids."""
    command = [sys.executable, "-c", RANK, str(shm / "r/rank-0000.page"), mode]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    return process.pid, int(process.stdout.readline())


def gone(pid: int) -> bool:
    """True once the process has ended, waited for by its parent or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone(pid)


def kill(pid: int, **args: object) -> Action:
    return Action("kill_process", "r/rank 0", {"pid": pid, "run": "r", "rank": 0, "role": "data", **args})


@pytest.mark.parametrize("mode", ["listed", "descendant"])
def test_a_helper_of_the_rank_is_killed(shm: Path, started: list[subprocess.Popen[str]], mode: str) -> None:
    """It is one if the page lists it or if it descends from the rank."""
    _, child = rank(shm, started, mode)
    ok, detail = Executor(shm=shm, notify=Told()).perform(kill(child))
    assert ok, detail
    assert until_gone(child)


def test_a_process_of_somebody_else_is_not_killed(shm: Path, started: list[subprocess.Popen[str]]) -> None:
    """Neither the rank itself, nor init, nor this process, nor one that has nothing to do with the rank."""
    parent, child = rank(shm, started)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], text=True)
    started.append(stranger)
    executor = Executor(shm=shm, notify=Told())
    for pid in (parent, 1, os.getpid(), stranger.pid):
        ok, detail = executor.perform(kill(pid))
        assert not ok
        assert str(pid) in detail
    assert not gone(child)
    assert stranger.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_page_cannot_have_root_kill_another_users_process(shm: Path) -> None:
    """A user who lists a foreign process on his own page gets nothing."""
    with subprocess.Popen(["sleep", "600"], user=65534) as victim:
        reporter = Reporter(shm / "r/rank-0000.page", rank=0, run="r")
        reporter.add_worker(victim.pid, "data")
        ok, detail = Executor(shm=shm, notify=Told()).perform(kill(victim.pid))
        assert (ok, "another user" in detail) == (False, True)
        assert victim.poll() is None
        victim.kill()


@pytest.mark.parametrize(
    "args",
    [{"run": x} for x in ("../r", "", "a/b", "none")] + [{"pid": x} for x in ("7", -1, True, 2**70)] + [{"rank": None}],
)
def test_malformed_arguments_are_refused(shm: Path, args: dict[str, object]) -> None:
    """Arguments come from files that a user can write."""
    Reporter(shm / "r/rank-0000.page", rank=0, run="r")
    ok, detail = Executor(shm=shm, notify=Told()).perform(kill(**{"pid": 7, **args}))
    assert not ok
    assert detail


def test_a_helper_that_is_gone_is_said_to_be_gone(shm: Path, started: list[subprocess.Popen[str]]) -> None:
    """No signal is sent to a pid that may be somebody else's by now."""
    parent, child = rank(shm, started)
    os.kill(parent, signal.SIGKILL)
    started[0].wait()
    ok, detail = Executor(shm=shm, notify=Told()).perform(kill(child))
    assert (ok, "is gone" in detail) == (False, True)
    os.kill(child, signal.SIGKILL)


def test_a_power_limit_goes_through_its_port(shm: Path) -> None:
    """The outcome says what was set, and a driver's refusal why it was not."""
    limits: list[tuple[int, float]] = []
    action = Action("set_power_limit", "GPU-1", {"gpu": 1, "watts": 595})
    executor = Executor(shm=shm, notify=Told(), set_power_limit=lambda gpu, watts: limits.append((gpu, watts)))
    assert executor.perform(action) == (True, "power limit of GPU 1 set to 595 W")
    assert limits == [(1, 595.0)]

    def refuse(gpu: int, watts: float) -> None:
        raise RuntimeError("no permission")

    assert Executor(shm=shm, notify=Told(), set_power_limit=refuse).perform(action) == (
        False,
        "RuntimeError: no permission",
    )
    assert not Executor(shm=shm, notify=Told()).perform(action)[0]
    assert not executor.perform(Action("set_power_limit", "GPU-1", {"gpu": 1, "watts": "595"}))[0]


def test_an_unknown_verb_is_refused(shm: Path) -> None:
    """A runbook cannot make the executor do what it does not know."""
    assert Executor(shm=shm, notify=Told()).perform(Action("reboot", "node")) == (False, "no such action: reboot")


class Launcher:
    """A control socket that answers every request with ``answer`` and remembers the requests."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self.requests: list[object] = []
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection, connection.makefile("rwb") as stream:
                if line := stream.readline():
                    self.requests.append(json.loads(line))
                    stream.write(self._answer)


def restart(control: Path) -> Action:
    return Action("restart_generation", "r", {"control": str(control), "reason": "data stalled"})


def test_a_generation_is_restarted_through_the_launchers_socket(shm: Path) -> None:
    """The request carries the reason, and a refusal is the outcome's detail."""
    control = shm / "r/control.sock"
    launcher = Launcher(control, b'{"ok": true}\n')
    assert Executor(shm=shm, notify=Told()).perform(restart(control)) == (True, "the launcher restarts the generation")
    assert launcher.requests == [{"cmd": "restart", "reason": "data stalled"}]
    control.unlink()
    Launcher(control, b'{"ok": false, "error": "stopping"}\n')
    assert Executor(shm=shm, notify=Told()).perform(restart(control)) == (False, "the launcher refused: stopping")


@pytest.mark.parametrize("answer", [b"", b"ok\n", b"[1]\n", b"{" * 100_000])
def test_a_launcher_that_answers_nonsense_is_a_failure(shm: Path, answer: bytes) -> None:
    """Whatever comes back, it is a sentence."""
    Launcher(shm / "r/control.sock", answer)
    assert not Executor(shm=shm, notify=Told()).perform(restart(shm / "r/control.sock"))[0]


def test_a_launcher_that_does_not_answer_is_given_up(shm: Path) -> None:
    """A stopped launcher cannot hold the agent's action for longer than the time-out."""
    control = shm / "r/control.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(control))
        silent.listen()
        with pytest.raises(ControlError, match="does not answer"):
            ask_launcher(control, {"cmd": "status"}, timeout_s=0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for two users")
def test_a_run_cannot_lead_root_to_another_users_run(shm: Path, started: list[subprocess.Popen[str]]) -> None:
    """Links in a user's folder to somebody else's page or socket are not followed."""
    _, child = rank(shm, started)
    launcher = Launcher(shm / "r/control.sock", b'{"ok": true}\n')
    (shm / "link").symlink_to(shm / "r")
    (shm / "evil").mkdir()
    (shm / "evil/control.sock").symlink_to(shm / "r/control.sock")
    (shm / "evil/rank-0000.page").symlink_to(shm / "r/rank-0000.page")
    for path in (shm / "link", shm / "evil"):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    executor = Executor(shm=shm, notify=Told())
    for run in ("link", "evil"):
        assert not executor.perform(kill(child, run=run))[0]
        assert not executor.perform(restart(shm / run / "control.sock"))[0]
    assert not gone(child)
    assert launcher.requests == []


def test_only_a_socket_of_a_run_is_spoken_to(shm: Path) -> None:
    """A path outside of the runs, or something else than a socket, is refused."""
    outside = shm.parent / "outside.sock"
    Launcher(outside, b'{"ok": true}\n')
    (shm / "r/file.sock").write_text("")
    executor = Executor(shm=shm, notify=Told())
    for path in (outside, shm / "r/../../outside.sock", shm / "r/file.sock", shm / "r/none.sock"):
        assert not executor.perform(restart(path))[0]


def test_an_action_runs_in_the_background_after_the_intention_is_durable(shm: Path) -> None:
    """Submitting returns at once; the journal is written before the world is touched."""
    order: list[str] = []
    release = threading.Event()

    def written(_patience_s: float) -> bool:
        release.wait(20)
        order.append("written")
        return True

    executor = Executor(shm=shm, notify=Told(), set_power_limit=lambda _gpu, _watts: order.append("acted"))
    executor.submit("i", 3, LOWER, written)
    assert executor.outcomes.empty()
    release.set()
    assert executor.outcomes.get(timeout=60) == Outcome("i", 3, True, "power limit of GPU 0 set to 500 W")
    assert order == ["written", "acted"]


def test_without_a_durable_intention_there_is_no_action(shm: Path) -> None:
    """Notifications aside, which change nothing."""
    limits: list[float] = []
    executor = Executor(shm=shm, notify=Told(), set_power_limit=lambda _gpu, watts: limits.append(watts))
    executor.submit("i", 0, LOWER, lambda _patience_s: False)
    outcome = executor.outcomes.get(timeout=60)
    assert (outcome.ok, outcome.detail) == (False, "not carried out: the journal was not written within 5 s")
    assert limits == []
    executor.submit("i", 1, Action("notify", "node", {"text": "look"}), lambda _patience_s: False)
    assert executor.outcomes.get(timeout=60) == Outcome("i", 1, True, "told")


def test_an_action_that_never_ends_has_one_outcome(shm: Path) -> None:
    """A hung driver call is a failure after the deadline, and its late end changes nothing."""
    release = threading.Event()
    executor = Executor(shm=shm, notify=Told(), set_power_limit=lambda gpu, watts: release.wait(20), deadline_s=0.05)
    executor.submit("i", 0, LOWER, lambda _patience_s: True)
    outcome = executor.outcomes.get(timeout=60)
    assert (outcome.ok, outcome.detail) == (False, "has not ended within 0.05 s")
    release.set()
    time.sleep(0.1)
    assert executor.outcomes.empty()


def test_a_flood_of_notifications_has_few_threads_and_delays_no_action(shm: Path) -> None:
    """The service has 128 threads; with one for each notification, users stopped the agent by a slow webhook."""
    release, limits, before = threading.Event(), list[float](), threading.active_count()
    executor = Executor(
        shm=shm,
        notify=lambda _text, _fields: bool(release.wait(20)),
        set_power_limit=lambda _gpu, watts: limits.append(watts),
    )
    for number in range(300):
        executor.submit("loss_nan-1", number, Action("notify", "run", {"text": "look"}), lambda _patience_s: True)
    executor.submit("gpu_throttle-1", 0, LOWER, lambda _patience_s: True)
    assert executor.outcomes.get(timeout=60).incident == "gpu_throttle-1"
    assert threading.active_count() - before <= 3 * LANE_THREADS + 1
    release.set()
    told = {executor.outcomes.get(timeout=60).number for _ in range(300)}
    assert told == {*range(300)}
    assert limits


def test_people_are_told_the_reason(shm: Path) -> None:
    """A notification's text is the action's, and an unreachable webhook is the outcome."""
    told = Told()
    action = Action("notify", "n17", reason="have its cooling serviced")
    assert Executor(shm=shm, notify=told).perform(action) == (True, "told")
    assert told.texts == ["have its cooling serviced"]
    failing = Executor(shm=shm, notify=Told(ActionError("the webhook could not be reached: ConnectError")))
    assert failing.perform(action) == (False, "the webhook could not be reached: ConnectError")


def test_ancestors_end_at_the_first_process() -> None:
    """The line of parents leads from this process up, and a pid that does not exist has none."""
    assert ancestors(os.getpid())[0] == os.getppid()
    assert ancestors(2**22 + 1) == []
