"""The agent is killed in the middle of an action, whichever it is: carried out once more, or given up in words."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socketserver
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from opsd.agent.actions import VERBS
from opsd.client import Reporter
from opsd.runbooks.base import Action, Evidence, Finding, View
from tests.fakes.agent import Agent, runbook
from tests.fakes.clock import until
from tests.fakes.collectors import FakeCollector
from tests.fakes.incidents import finding

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
        self.launcher = Launcher(self)
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


class Launcher(socketserver.ThreadingUnixStreamServer):
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
        launcher: Launcher = self.server  # type: ignore[assignment]
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
