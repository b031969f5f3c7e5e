"""What people say of incidents: who has one, and that one is over."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.agent.daemon import MAX_FOR_S, Control, parse
from opsd.agent.lifecycle import Order, holder
from opsd.agent.notify import Announcer
from opsd.collectors.base import Reading
from opsd.control import ControlError, ask
from opsd.runbooks.base import Action, Finding, Incident, Severity, State, View
from tests.fakes.clock import eventually, until
from tests.fakes.collectors import SILENT, Agent, FakeCollector, runbook
from tests.fakes.incidents import finding


class World:
    """A node with one fault, and an agent that tells people of it."""

    def __init__(self, folder: Path, mode: str = "observe") -> None:
        self.folder, self.mode = folder, mode
        self.findings: list[Finding] = [finding()]
        self.healed: bool | None = False
        self.told: list[str] = []
        self.agent = self.start()

    def start(self) -> Agent:
        def detect(_view: View) -> list[Finding]:
            return self.findings

        def remedy(_incident: Incident, _view: View) -> list[Action]:
            return [Action("notify", "people", {}, "look")]

        book = runbook(
            detect=detect, remedy=remedy, healed=lambda _incident, _view: self.healed, clear_after_s=3.0, verify_s=30.0
        )
        announce = Announcer(lambda text, fields: self.told.append(text), "n17", SILENT)
        clock = self.agent.clock if hasattr(self, "agent") else None
        source = FakeCollector("source", lambda: Reading())
        return Agent(
            self.folder, [source], [book], mode=self.mode, notify=announce.wait, announce=announce, clock=clock
        )

    def restart(self) -> None:
        self.agent.journal.flush(10)
        self.agent.journal.close()
        self.agent = self.start()

    def order(self, *words: object, **more: object) -> Order:
        """Ask for something, and let a tick pass."""
        order = Order(*words, **more)  # type: ignore[arg-type]
        self.agent.incident_manager.orders.put(order)
        self.agent.tick()
        return order

    @property
    def incident(self) -> Incident:
        (found,) = self.agent.incident_manager.current
        return found

    def states(self) -> set[str]:
        """The states that the metric shows for the kind."""
        return {name.split(",")[2] for name, n in self.agent.metrics().items() if "opsd_incidents{" in name and n}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.agent.tick()
    yield made
    made.agent.journal.close()


def test_who_acknowledges_has_it_and_it_pages_nobody_else(tmp_path: Path) -> None:
    """It escalates in silence, is acknowledged in the metric and after a restart, and its end is told."""
    world = World(tmp_path, mode="recommend")
    world.findings = []
    world.agent.tick()
    world.findings = [finding()]
    world.agent.tick()
    until(lambda: len(world.told) == 1)
    assert world.order("ack", world.incident.id, "ada").done.startswith(
        f"{world.incident.id} is acknowledged: ada since"
    )
    world.agent.tick(80)
    world.restart()
    world.agent.tick(3)
    assert world.incident.state is State.ESCALATED and world.states() == {"acknowledged"}
    ack = holder(world.incident)
    assert ack is not None and (ack.by, ack.until) == ("ada", None)
    world.findings, world.healed = [], True
    world.agent.tick(6)
    assert not world.agent.incident_manager.current
    assert eventually(lambda: len(world.told) == 2) and "over" in world.told[1]


@pytest.mark.parametrize(
    ("for_s", "severity", "why"),
    [
        (5.0, Severity.WARNING, "the acknowledgement by ada was for 5.0 s"),
        (None, Severity.CRITICAL, "trouble worse: GPU 0 is in trouble"),
    ],
)
def test_it_pages_again_once_the_time_is_over_or_it_is_worse(
    world: World, for_s: float | None, severity: Severity, why: str
) -> None:
    """And says why; then nobody has it."""
    assert eventually(lambda: len(world.told) == 1)
    world.order("ack", world.incident.id, "ada", for_s=for_s)
    assert world.states() == {"acknowledged"}
    world.findings = [finding(severity=severity)]
    world.agent.tick(6)
    assert eventually(lambda: len(world.told) == 2)
    assert why in world.told[1] and holder(world.incident) is None and world.states() == {"open"}
    world.agent.tick(6)
    assert len(world.told) == 2


@pytest.mark.parametrize("lasting", [True, False], ids=["a condition", "an event"])
@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_person_has_closed_opens_on_new_evidence_only(world: World, lasting: bool, restarts: bool) -> None:
    """The same evidence goes on for long and is no incident; the reason is in the journal."""
    first = world.incident.id
    if not lasting:
        world.findings = [finding(struck_at=world.agent.clock.wall())]
        world.agent.tick()
    assert world.order("close", first, "ada", reason="cable was pulled for a test").done == f"closed {first}"
    if restarts:
        world.restart()
    world.agent.tick(20)
    assert world.agent.incident_manager.current == ()
    (ended,) = world.agent.incident_manager.ended
    assert (ended.state, ended.verdict) == (State.RESOLVED, "closed by ada: cable was pulled for a test")
    if lasting:
        world.findings, world.healed = [], True
        world.agent.tick(6)
        world.findings, world.healed = [finding()], False
    else:
        world.findings = [finding(struck_at=world.agent.clock.wall())]
    world.agent.tick(2)
    assert world.incident.id != first and world.incident.relapses == 0
    ended = world.agent.incident_manager.ended[0]
    world.restart()
    assert next(i for i in world.agent.incident_manager.ended if i.id == first).closed.gone_at is not None  # type: ignore[union-attr]


def test_a_closed_incident_that_gets_graver_opens_anew(world: World) -> None:
    """A higher severity was not what the person spoke of."""
    world.order("close", world.incident.id, "ada", reason="known")
    world.findings = [finding(severity=Severity.CRITICAL)]
    world.agent.tick(2)
    assert world.incident.severity is Severity.CRITICAL


def test_what_cannot_be_done_is_a_sentence(world: World) -> None:
    """An unknown incident, one that is over, one that opsd acts on."""
    id = world.incident.id
    assert world.order("ack", "x", "ada").error == "the agent knows no incident 'x'"
    name = (world.incident.kind, world.incident.key)
    book = world.agent.incident_manager._book
    world.agent.incident_manager._book = replace(book, incidents={name: replace(world.incident, state=State.ACTING)})
    assert "opsd is acting on" in world.order("close", id, "ada", reason="done").error
    world.agent.incident_manager._book = book
    assert world.order("close", id, "ada", reason="done").done
    for verb in ("ack", "close"):
        assert f"{id} is over since" in world.order(verb, id, "ada", reason="done").error


def test_the_times_of_an_acknowledgement_move_with_the_clock(world: World) -> None:
    """A step of an hour ends no silence."""
    world.order("ack", world.incident.id, "ada", for_s=60.0)
    world.agent.clock.wall_now += 3600.0
    world.agent.tick(3)
    assert holder(world.incident) is not None


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({"cmd": "stop"}, "an agent knows the commands ack and close, not 'stop'"),
        ({"cmd": "ack", "by": "ada"}, "the incident has no id"),
        ({"cmd": "ack", "incident": "i", "by": " \n"}, "a name has 1 to 64 characters"),
        ({"cmd": "ack", "incident": "i", "by": "a" * 65}, "a name has 1 to 64 characters"),
        *(({"cmd": "ack", "incident": "i", "by": "ada", "for_s": for_s}, "the time is not between a second and a year")
          for for_s in (0, 2 * MAX_FOR_S, "4h")),
        ({"cmd": "close", "incident": "i", "by": "ada"}, "a reason has 1 to 500 characters"),
        ({"cmd": "close", "incident": "i", "by": "ada", "reason": "x" * 501}, "a reason has 1 to 500 characters"),
    ],
)  # fmt: skip
def test_a_request_that_is_none_is_refused(request_: dict[str, object], problem: str) -> None:
    assert parse(request_) == problem


@contextlib.contextmanager
def control(world: World, patience_s: float = 10.0) -> Iterator[Control]:
    """Its socket, open."""
    made = Control(world.agent.incident_manager, world.agent.journal, SILENT, patience_s=patience_s)
    world.agent.journal.flush(10)
    until(lambda: made.after_tick() or made.path.exists())
    yield made
    made.close()
    assert not made.path.exists()


def test_the_socket_is_for_root_and_the_agents_user(world: World) -> None:
    """An order is answered after the tick that carries it out, and is in the journal by then."""
    with control(world) as socket:
        assert socket.path.stat().st_mode & 0o777 == 0o600
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(0.01):
                world.agent.tick()
                socket.after_tick()

        loop = threading.Thread(target=run)
        loop.start()
        request = {"cmd": "ack", "incident": world.incident.id, "by": "ada"}
        answer = ask(socket.path, request, 20.0, "the agent")
        refused = ask(socket.path, {**request, "incident": "x"}, 20.0, "the agent")
        stop.set()
        loop.join()
    assert answer["ok"] and answer["said"].startswith(f"{world.incident.id} is acknowledged: ada since")
    assert refused == {"ok": False, "error": "the agent knows no incident 'x'"}
    world.restart()
    assert holder(world.incident) is not None
    with pytest.raises(ControlError, match="the agent at"):
        ask(socket.path, request, 1.0, "the agent")


def test_a_loop_that_hangs_is_said(world: World) -> None:
    """The person does not wait for ever."""
    with control(world, patience_s=0.1) as socket:
        request = {"cmd": "ack", "incident": world.incident.id, "by": "ada"}
        assert "the agent's loop hangs" in ask(socket.path, request, 20.0, "the agent")["error"]
