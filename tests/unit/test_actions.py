"""The executor: it does what it is asked, drains within the budget, and never hangs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.actions import LANE_THREADS, VERBS, ActionError, Executor, ancestors
from opsd.agent.lifecycle import Outcome
from opsd.client import Reporter
from opsd.control import ControlError, ask_launcher
from opsd.runbooks.base import Action, Evidence, Finding, View
from opsd.settings.policy import PolicySettings
from opsd.slurm.deferred import SlurmDrainer
from opsd.slurm.ownership import Refused, allowance, drain_objections, held, kind_of, surplus, take_over
from opsd.slurm.port import Node, SlurmError, SlurmUnavailable
from tests.fakes.clock import until
from tests.fakes.collectors import Agent, FakeCollector, runbook
from tests.fakes.incidents import finding
from tests.fakes.slurm import FakeSlurm

# The executor: it does what it is asked, refuses what nobody may ask for, and never hangs.


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


# Draining this node: within the cluster's budget, by its own name only, and never blindly.


DRAIN = frozenset({"drain"})


def ours(name: str, at: float = 1.0) -> Node:
    return Node(name, "idle", DRAIN, "opsd: GPU 2 is lost", "root", at)


def cluster(*nodes: Node, idle: int = 40) -> FakeSlurm:
    return FakeSlurm([*nodes, *(Node(f"n{number:02d}", "allocated") for number in range(idle))])


def drainer(slurm: FakeSlurm, node: str = "n07", share: float = 0.05) -> SlurmDrainer:
    return SlurmDrainer(lambda: slurm, node, PolicySettings(max_drained_share=share, min_drained=1))


def test_a_node_is_drained_with_opsds_reason() -> None:
    """The reason tells whose it is."""
    slurm = cluster()
    assert drainer(slurm)("n07", "GPU 2 is lost") == "drained n07"
    assert slurm.updates == [(("n07",), "drain", "opsd: GPU 2 is lost")]


def test_a_second_time_changes_nothing() -> None:
    """The first reason is kept, and the node it holds already does not count against it."""
    slurm = cluster(ours("x1"))
    drain = drainer(slurm)
    drain("n07", "GPU 2 is lost")
    assert drain("n07", "again") == "n07 was drained by opsd already"
    assert len(slurm.updates) == 1


def test_the_budget_is_the_clusters() -> None:
    """Two of 42 nodes at 5 %; nodes that other people hold do not count."""
    others = Node("x3", "down", DRAIN, "replace the fan", "alice", 1.0)
    with pytest.raises(SlurmError, match=r"opsd holds 2 of 43 nodes already \(x1, x2\); 2 may be held at once"):
        drainer(cluster(ours("x1"), ours("x2"), others))("n07", "GPU 2 is lost")
    assert drainer(cluster(ours("x1"), others))("n07", "GPU 2 is lost") == "drained n07"


def test_somebody_elses_node_is_left_alone() -> None:
    """The user who drained it decides."""
    slurm = cluster(Node("n99", "idle", DRAIN, "mine", "alice"))
    with pytest.raises(SlurmError, match="out of service by alice"):
        drainer(slurm, "n99")("n99", "GPU 2 is lost")
    assert slurm.updates == []


def test_without_an_answer_of_slurm_nothing_is_done() -> None:
    """How many nodes are held is not known then."""
    slurm = cluster()
    slurm.error = SlurmUnavailable("scontrol has not answered within 5 s")
    with pytest.raises(SlurmError, match="Slurm: scontrol has not answered"):
        drainer(slurm)("n07", "GPU 2 is lost")


class Raced(FakeSlurm):
    """Another agent drains a node between our look at the cluster and our update."""

    def update_nodes(self, names, update, reason="") -> None:
        if not self.updates:
            self.by_name["a0"] = ours("a0", at=0.5)
        super().update_nodes(names, update, reason)


def test_of_two_agents_that_drain_at_once_one_gives_back() -> None:
    """The budget holds although nobody coordinates."""
    slurm = Raced([Node("a0", "idle"), *(Node(f"n{number:02d}", "idle") for number in range(9))])
    with pytest.raises(SlurmError, match="at the same time"):
        drainer(slurm)("n07", "GPU 2 is lost")
    assert [update for _, update, _ in slurm.updates] == ["drain", "resume"]
    assert [node.name for node in held(slurm.nodes())] == ["a0"]


def test_of_two_agents_that_take_over_at_once_one_leaves_its_node_as_it_was() -> None:
    """Slurm had drained it, and it stays drained."""
    mine = Node("n07", "idle", frozenset({"drain"}), "Prolog error", "slurm", 1.0)
    slurm = Raced([Node("a0", "idle"), mine, *(Node(f"n{number:02d}", "idle") for number in range(8, 16))])
    with pytest.raises(Refused, match="at the same time"):
        take_over(
            slurm,
            "n07",
            "opsd:prolog preflight: it failed",
            PolicySettings(max_drained_share=0.05, min_drained=1),
            now=2.0,
        )
    assert (slurm.by_name["n07"].reason, "drain" in slurm.by_name["n07"].flags) == ("Prolog error", True)
    assert slurm.by_comment.get("n07", "") == ""


def test_an_agent_drains_its_own_node_only(tmp_path) -> None:
    """Whatever an action names; and nothing at all unless that was allowed."""
    slurm = cluster()
    action = Action("drain_node", "n08", {"node": "n08"}, "GPU 2 is lost")
    executor = Executor(shm=tmp_path, notify=lambda _text, _fields: None, drain_node=drainer(slurm))
    assert executor.perform(action) == (False, "this agent drains n07 only, not n08")
    forbidden = Executor(shm=tmp_path, notify=lambda _text, _fields: None)
    ok, why = forbidden.perform(action)
    assert (ok, "policy.drain" in why, slurm.updates) == (False, True, [])
    own = replace(action, args={"node": "n07", "kind": "gpu_lost", "incident": "gpu_lost-7"})
    assert executor.perform(own) == (True, "drained n07")
    ((_, _, told),) = slurm.updates
    assert told == "opsd:gpu_lost-7 gpu_lost: GPU 2 is lost; see opsd incidents show gpu_lost-7"
    assert kind_of(told) == "gpu_lost"


names = st.integers(0, 30).map(lambda n: f"n{n}")

nodes = st.lists(
    st.builds(
        Node,
        names,
        st.sampled_from(["idle", "allocated", "down"]),
        st.sampled_from([DRAIN, frozenset()]),
        st.sampled_from(["", "opsd: x", "bad disk"]),
        st.just("root"),
        st.one_of(st.none(), st.floats(0, 10)),
    ),
    min_size=1,
    unique_by=lambda n: n.name,
)


@given(nodes, names, st.floats(0.001, 1))
def test_the_budget_is_never_exceeded(cluster_nodes: list[Node], name: str, share: float) -> None:
    """What may be drained fits in; what is surplus is exactly what does not."""
    ours, limit = held(cluster_nodes), allowance(cluster_nodes, PolicySettings(max_drained_share=share))
    if not drain_objections(cluster_nodes, {}, [name], PolicySettings(max_drained_share=share), 0.0) and name not in {
        node.name for node in ours
    }:
        assert len(ours) + 1 <= limit
    beyond = [node for node in ours if surplus(cluster_nodes, node.name, PolicySettings(max_drained_share=share))]
    assert len(beyond) == max(0, len(ours) - limit)


# The agent is killed in the middle of an action, whichever it is: carried out once more, or given up in words.


NODE, RUN = "n1", "r"

GIVEN_UP = "given up after a restart of the agent: doing it twice could do harm"

ENDS = {
    "kill_process": ("failed", GIVEN_UP),
    "set_power_limit": ("ok", "power limit of GPU 0 set to 500 W"),
    "restart_generation": ("failed", GIVEN_UP),
    "swap_node": ("ok", "n1 is out of the run, n2 took its place; drained n1"),
    "drain_node": ("ok", "drained n1"),
    "comment_job": ("ok", "wrote it into the comment of job 7"),
    "notify": ("ok", "told"),
}
"""What becomes of each verb after the next start: outcome and detail."""


class World:
    """What agents act on, in files: the one that is killed is another process. ``hold`` stops actions halfway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shm = folder / "shm"
        (self.shm / RUN).mkdir(parents=True)
        self.hold, self._begun, self._done = folder / "hold", folder / "begun", folder / "done"
        self.launcher = SwappingLauncher(self)
        self.helper = subprocess.Popen(["sleep", "600"])
        self._rank = Reporter(self.shm / RUN / "rank-0000.page", rank=0, run=RUN)
        self._rank.add_worker(self.helper.pid, "data")

    def close(self) -> None:
        self.launcher.shutdown()
        self.launcher.server_close()
        self.helper.kill()
        self.helper.wait()

    def action(self, verb: str) -> Action:
        control = str(self.shm / RUN / "control.sock")
        args: Mapping[str, Mapping[str, object]] = {
            "kill_process": {"pid": self.helper.pid, "run": RUN, "rank": 0},
            "set_power_limit": {"gpu": 0, "watts": 500},
            "restart_generation": {"control": control},
            "swap_node": {"node": NODE, "control": control, "kind": "trouble", "incident": "i"},
            "drain_node": {"node": NODE},
            "comment_job": {"job": 7},
        }
        return Action(verb, NODE, args.get(verb, {}), "in trouble")

    def change(self, what: str) -> str:
        """An effect on the world, halfway for as long as ``hold`` exists."""
        with self._begun.open("a") as begun:
            begun.write(f"{what}\n")
        while self.hold.exists():
            time.sleep(0.01)
        with self._done.open("a") as done:
            done.write(f"{what}\n")
        return f"{what} {NODE}"

    def begun(self) -> list[str]:
        return self._begun.read_text().splitlines() if self._begun.exists() else []

    def done(self) -> list[str]:
        dead = ["killed"] if self.helper.poll() is not None else []
        return [*(self._done.read_text().splitlines() if self._done.exists() else []), *dead]

    def agent(self, verb: str) -> Agent:
        def detect(view: View) -> Iterator[Finding]:
            yield finding(evidence=(Evidence("broken", "kernel", view.wall),))

        book = runbook(
            detect=detect, remedy=lambda _i, _v: (self.action(verb),), healed=lambda _i, _v: False, max_attempts=1
        )
        return Agent(
            self.folder / "state", [FakeCollector("source")], [book], shm=self.shm,
            notify=lambda _text, _fields: self.change("told") and None,
            set_power_limit=lambda _gpu, _watts: self.change("limited") and None,
            drain_node=lambda _node, _reason: self.change("drained"),
            comment_job=lambda _job, _text: self.change("commented") and None,
        )  # fmt: skip


class SwappingLauncher(socketserver.ThreadingUnixStreamServer):
    """The launcher of the run: it restarts it, and swaps the node for n2."""

    daemon_threads = True

    def __init__(self, world: World) -> None:
        super().__init__(str(world.shm / RUN / "control.sock"), Answer)
        self.world = world
        self.nodes, self.asked = [NODE], list[str]()
        threading.Thread(target=partial(self.serve_forever, 0.05), daemon=True).start()


class Answer(socketserver.StreamRequestHandler):
    """One request."""

    def handle(self) -> None:
        launcher: SwappingLauncher = self.server  # type: ignore[assignment]
        command = json.loads(self.rfile.readline())["cmd"]
        if command != "status":
            launcher.asked.append(command)
            launcher.world.change(command)
        if command == "swap":
            launcher.nodes = ["n2"]
        answer = {"ok": True, "nodes": launcher.nodes, "spares": ["n3"], "head": "n3", "generation": 1}
        with suppress(OSError):  # the agent was killed meanwhile
            self.wfile.write(json.dumps(answer).encode() + b"\n")


def live(world: World, verb: str) -> None:
    """The life of the agent that is killed: it acts and never gets to know what came of it."""
    agent = world.agent(verb)
    agent.tick()
    time.sleep(600)


def intended(world: World, verb: str) -> bool:
    """Whether the action is in the journal."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(world.folder / "state/journal.db")) as journal:
        return journal.execute("SELECT count(*) FROM actions WHERE verb = ?", (verb,)).fetchone() == (1,)
    return False


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.mark.parametrize("halfway", [True, False], ids=["halfway", "done"])
@pytest.mark.parametrize("verb", VERBS)
def test_an_action_is_finished_or_given_up_in_words(world: World, verb: str, halfway: bool) -> None:
    """Killed before the effect or just after it, the next agent knows what to say; no harm is done twice."""
    if halfway:
        world.hold.touch()
    process = multiprocessing.get_context("fork").Process(target=live, args=(world, verb))
    process.start()
    assert process.pid is not None
    until(lambda: intended(world, verb) and ((halfway and world.begun()) or world.done()))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    world.hold.unlink(missing_ok=True)
    agent = world.agent(verb)

    def ended() -> list[tuple[str, str]]:
        agent.tick()
        (incident,) = agent.incident_manager.current
        return [(str(a["outcome"]), str(a["detail"])) for a in incident.actions if a["outcome"] != "running"]

    outcome, detail = until(ended)[0]
    agent.journal.close()
    said = detail.replace("n1 has left the run", "n1 is out of the run, n2 took its place")
    assert (outcome, said) == ENDS[verb]
    assert len(agent.incident_manager.current[0].actions) == 1
    assert world.launcher.asked.count("restart") == (verb == "restart_generation")
    assert until(world.done)
