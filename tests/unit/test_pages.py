"""Pages about incidents: one for each thing that is new, with the advice of the runbook and the words of the brief."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from opsd.agent.actions import ActionError, Drainer
from opsd.agent.brief import brief
from opsd.agent.incident_manager import TELL_AGAIN_S
from opsd.agent.notify import Announcer
from opsd.collectors.base import Reading
from opsd.runbooks.base import Action, Evidence, Finding, Incident, State, View
from opsd.runbooks.lib.remedies import notice
from opsd.settings.policy import PolicySettings, Silence
from opsd.slurm.port import SlurmError
from tests.fakes.clock import eventually
from tests.fakes.collectors import SILENT, Agent, FakeCollector, runbook
from tests.fakes.incidents import finding

ADVICE = ": have the drive replaced"
LIMITS = PolicySettings(cooldown_s=0, drain=True)


class Pager:
    """A node with one fault, and what its agent has told people."""

    def __init__(self, folder: Path, mode: str, limits: PolicySettings = LIMITS, drain: Drainer | None = None) -> None:
        self.folder, self.mode, self.limits, self.drain = folder, mode, limits, drain
        self.faulty, self.error = True, ""
        self.pages: list[Mapping[str, object]] = []
        self.agent = self.start()

    def start(self) -> Agent:
        def detect(view: View) -> list[Finding]:
            return [finding(evidence=(Evidence("broken", "kernel", view.wall),))] if self.faulty else []

        def remedy(incident: Incident, _view: View) -> Sequence[Action]:
            drain = Action("drain_node", "node", {"node": "node"}, "broken")
            return (*([drain] if self.drain else ()), notice("node", incident, ADVICE))

        def send(text: str, fields: Mapping[str, object]) -> None:
            self.pages.append({**fields, "text": text})
            if self.error:
                raise ActionError(self.error)

        book = runbook(
            detect=detect,
            remedy=remedy,
            healed=lambda _incident, _view: not self.faulty,
            clear_after_s=3.0,
            verify_s=9.0,
        )
        announce = Announcer(send, "node", SILENT, lambda _kind: self.mode)
        return Agent(
            self.folder, [FakeCollector("source", lambda: Reading())], [book], mode=self.mode, limits=self.limits,
            notify=announce.wait, announce=announce, drain_node=self.drain,
            clock=self.agent.clock if hasattr(self, "agent") else None,
        )  # fmt: skip

    def restart(self, mode: str) -> None:
        self.agent.journal.flush(10)
        self.agent.journal.close()
        self.mode = mode
        self.agent = self.start()

    def until_state(self, state: State) -> Incident:
        """Let time pass until the incident has the state."""
        assert eventually(lambda: self.agent.tick() or self.incident.state is state)
        return self.incident

    @property
    def incident(self) -> Incident:
        manager = self.agent.incident_manager
        return next(iter((*manager.current, *manager.ended)))

    def told(self, *states: str) -> bool:
        """Whether these are the pages, and no other comes."""
        found = eventually(lambda: len(self.pages) >= len(states))
        self.agent.tick(3)
        return bool(found) and [page["state"] for page in self.pages] == [*states]


@pytest.mark.parametrize("mode", ["observe", "recommend", "act"])
def test_an_incident_is_one_page_with_advice_and_id(tmp_path: Path, mode: str) -> None:
    """However often the runbook asks for a notification, and in each mode that comes later."""
    pager = Pager(tmp_path, mode)
    if mode == "observe":
        pager.agent.tick(30)
    else:
        pager.until_state(State.ESCALATED)
    pager.restart("recommend")
    pager.agent.tick(30)
    assert pager.told("opened")
    (page,) = pager.pages
    assert (page["id"], page["advice"]) == (pager.incident.id, "have the drive replaced")
    assert "; have the drive replaced; costs: " in str(page["text"])
    assert mode == "observe" or {(a["verb"], a["detail"]) for a in pager.incident.actions} == {("notify", "told")}
    pager.faulty = False
    pager.agent.tick(9)
    assert pager.told("opened", "over")


def test_a_page_that_nobody_got_stands_in_the_incident(tmp_path: Path) -> None:
    """Why, as the receiver has it."""
    pager = Pager(tmp_path, "recommend")
    pager.error = "the webhook answered with status 403"
    pager.until_state(State.VERIFYING)
    assert {(a["outcome"], a["detail"]) for a in pager.incident.actions} == {("failed", pager.error)}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_page_that_nobody_got_is_sent_again(tmp_path: Path, restarts: bool) -> None:
    """The receiver was restarted just then; the next agent knows of it too, and one that was taken is not repeated."""
    pager = Pager(tmp_path, "observe")
    pager.error = "the webhook answered with status 503"
    assert eventually(lambda: pager.agent.tick() or (pager.incident.untold == "opened" and pager.pages))
    failed = len(pager.pages)
    pager.error = ""
    if restarts:
        pager.restart("observe")
    pager.agent.tick(int(TELL_AGAIN_S) * 3)
    assert pager.told(*["opened"] * (failed + 1))


@pytest.mark.parametrize(("mode", "drains"), [("recommend", False), ("act", False), ("act", True)])
def test_what_the_page_said_stays_true_until_opsd_has_acted(tmp_path: Path, mode: str, drains: bool) -> None:
    """To have told people is no action, and a drain that is switched off is a person's."""
    limits = PolicySettings(cooldown_s=0, drain=False)
    pager = Pager(tmp_path, mode, limits, (lambda _node, _why: "drained") if drains else None)
    for state in (State.VERIFYING, State.ESCALATED):
        now = brief(pager.until_state(state), mode, "node")
        assert pager.told("opened")
        assert (now.acts, now.command) == (pager.pages[0]["acts"], pager.pages[0]["command"])
    if drains:
        assert now.acts == "you act: draining is switched off (policy.drain)"
        assert now.command.startswith(f"opsd drain node --incident {pager.incident.id} --reason ")
    else:
        assert now.acts == "you act: opsd has no remedy for this"


def test_a_drain_that_fails_is_told_once(tmp_path: Path) -> None:
    """With the reason and the command, and not again as an escalation."""

    def refuse(_node: str, _why: str) -> str:
        raise SlurmError("no Slurm here")

    pager = Pager(tmp_path, "act", drain=refuse)
    pager.until_state(State.ESCALATED)
    assert pager.told("opened", "failed")
    assert pager.pages[0]["acts"] == "opsd acts: it will drain node"
    assert pager.pages[1]["acts"] == "you act: opsd could not drain node (no Slurm here)"
    assert str(pager.pages[1]["command"]).startswith("opsd drain node ")


@pytest.mark.parametrize("what", ["mute", "maintenance"])
@pytest.mark.parametrize("mode", ["observe", "act"])
@pytest.mark.parametrize("restarts", [False, True])
def test_what_outlasts_a_silence_is_told_at_its_end(tmp_path: Path, what: str, mode: str, restarts: bool) -> None:
    """Once, also by the next agent; and then its end."""
    pager = silenced(tmp_path, mode, what)
    pager.agent.tick(20)
    if restarts:
        pager.restart(mode)
    pager.agent.tick(20)
    assert pager.told()
    pager.agent.tick(30)
    assert pager.told("opened")
    pager.faulty = False
    pager.agent.tick(9)
    assert len(pager.pages) == 2 and pager.pages[1]["state"] in ("resolved", "over")


@pytest.mark.parametrize(("heals_after_s", "states"), [(30, ()), (70, ("opened", "resolved"))])
def test_there_is_no_end_of_what_nobody_knows(tmp_path: Path, heals_after_s: int, states: Sequence[str]) -> None:
    """What heals in the silence is not told, also not later."""
    pager = silenced(tmp_path, "observe", "mute")
    pager.agent.tick(heals_after_s)
    pager.faulty = False
    pager.agent.tick(60)
    assert pager.incident.state is State.RESOLVED and pager.told(*states)


def silenced(folder: Path, mode: str, what: str) -> Pager:
    """The fault begins in a silence of a minute."""
    start = Agent(folder / "unused", [], []).clock.wall()
    times = {"start": datetime.fromtimestamp(start - 1, UTC), "end": datetime.fromtimestamp(start + 60, UTC)}
    return Pager(folder / "agent", mode, LIMITS.model_copy(update={what: (Silence(**times),)}))
