"""One fault is one incident: what is found because of it hangs below it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.correlate import CAUSES, RELEASE_S, correlate, held, joint_gpu_seconds, linked
from opsd.agent.incidents import IncidentTable
from opsd.agent.web import api
from opsd.collectors.base import Reading
from opsd.runbooks.base import Action, Cost, Culprit, Finding, Incident, Runbook, Severity
from tests.fakes.clock import FakeClock
from tests.fakes.collectors import Agent, FakeCollector, runbook
from tests.fakes.facts import rank
from tests.fakes.incidents import WALL, finding, incident

# One fault is one incident: what is found because of it hangs below it, whatever comes first.


RANKS = [rank(number, run="smol") for number in range(4)]


def of(kind: str, gpu: int | None = None, at: float = 0.0, **changes: object) -> Incident:
    """An incident of the run "smol" on the node n01, about the rank of the same number as ``gpu``."""
    culprit = Culprit("gpu", "n01", gpu, gpu)
    fields = {"id": f"{kind}-{gpu}", "kind": kind, "key": str(gpu), "culprit": culprit, "data": {"run": "smol"}}
    return incident(**{**fields, "opened_at": WALL + at, "last_seen_at": WALL + at, **changes})


def causes(*current: Incident, ended: tuple[Incident, ...] = (), at: float = 0.0) -> dict[str, str | None]:
    return correlate(current, ended, RANKS, WALL + at)


THROTTLE = of("gpu_throttle", 2, data={"gpu": 2})

STRAGGLER = of("straggler", 2, at=12)

DROP = of("throughput_drop", at=20, culprit=Culprit("unknown", "n01"))


def test_a_throttling_gpu_its_straggler_and_the_drop_are_one_incident() -> None:
    """Both symptoms hang below the GPU, although one of them could be the symptom of the other."""
    assert causes(DROP, STRAGGLER, THROTTLE) == {DROP.id: THROTTLE.id, STRAGGLER.id: THROTTLE.id, THROTTLE.id: None}


def test_symptoms_are_adopted_by_a_root_that_turns_up_later() -> None:
    """The drop hangs below the straggler until the reason of both is found, then both hang below that."""
    first = causes(DROP, STRAGGLER)
    assert first == {DROP.id: STRAGGLER.id, STRAGGLER.id: None}
    late = replace(THROTTLE, opened_at=WALL + 50)
    assert causes(replace(DROP, cause=STRAGGLER.id), STRAGGLER, late)[DROP.id] == THROTTLE.id


@pytest.mark.parametrize(
    "symptom",
    [
        of("straggler", 3, at=12),
        of("straggler", 2, at=12, culprit=Culprit("rank", "n02", 2, 2)),
        of("straggler", 2, at=-200),
        replace(DROP, culprit=Culprit("data", "n01", detail="every loader")),
        of("checkpoint_corrupt", 2, at=1),
    ],
    ids=["another GPU", "another node", "long before", "the data's fault", "not in the table"],
)
def test_what_has_nothing_to_do_with_it_stands_for_itself(symptom: Incident) -> None:
    """A wrong link would hide an incident."""
    assert causes(symptom, THROTTLE)[symptom.id] is None


def test_a_crash_belongs_to_an_xid_of_the_same_minute_only() -> None:
    """An Xid that came back counts from its last time."""
    xid = of("gpu_xid", 1, data={"gpu": 1, "at": WALL})
    crash = of("rank_crash", 1, at=30)
    later = of("rank_crash", 1, at=90)
    assert causes(crash, xid)[crash.id] == xid.id
    assert causes(later, xid)[later.id] is None
    again = replace(xid, data={"gpu": 1, "at": WALL + 85})
    assert causes(later, again)[later.id] == xid.id


def test_a_stall_explains_a_hang_of_its_own_generation_only() -> None:
    """What held the ranks up before a restart does not hold them up after it."""
    stall = of("dataloader_stall", 1, data={"run": "smol", "generation": 1})
    hang = of("rank_hang", 1, at=8, data={"run": "smol", "generation": 1})
    restarted = replace(hang, data={"run": "smol", "generation": 2})
    assert causes(hang, stall)[hang.id] == stall.id
    assert causes(restarted, stall)[hang.id] is None


def test_only_a_killed_rank_was_killed_for_memory() -> None:
    """A rank that raised an exception while memory was short has its own reason."""
    memory = of("host_memory", culprit=Culprit("node", "n01"), data={}, severity=Severity.CRITICAL)
    killed = of("rank_crash", 0, at=5, summary="rank 0 of smol ended with signal SIGKILL after step 7")
    raised = replace(killed, summary="rank 0 of smol ended with exit code 1 after step 7")
    assert causes(killed, memory)[killed.id] == memory.id
    assert causes(raised, memory)[raised.id] is None
    assert causes(killed, replace(memory, severity=Severity.WARNING))[killed.id] is None


def test_a_symptom_outlives_its_root_for_a_while_and_then_is_an_incident_of_its_own() -> None:
    """Detectors look back over some time, so that the end of a root is seen late."""
    over = replace(THROTTLE, resolved_at=WALL + 100)
    symptom = replace(STRAGGLER, cause=over.id)
    assert causes(symptom, ended=(over,), at=100 + RELEASE_S)[symptom.id] == over.id
    assert causes(symptom, ended=(over,), at=101 + RELEASE_S)[symptom.id] is None


def test_a_symptom_is_held_while_its_cause_is_current() -> None:
    """It ends with its root or after it."""
    symptom = replace(STRAGGLER, cause=THROTTLE.id)
    assert held([symptom, THROTTLE]) == {symptom.id}
    assert held([symptom]) == frozenset()


def test_a_loss_that_two_incidents_report_is_counted_once() -> None:
    """What happens at the same time is one loss, what happens one after the other adds up."""
    throttle = replace(THROTTLE, last_seen_at=WALL + 100, cost=Cost(gpu_seconds=100.0))
    same = replace(STRAGGLER, opened_at=WALL, last_seen_at=WALL + 100, cost=Cost(gpu_seconds=90.0))
    after = replace(STRAGGLER, opened_at=WALL + 100, last_seen_at=WALL + 200, cost=Cost(gpu_seconds=30.0))
    assert joint_gpu_seconds([throttle, same]) == pytest.approx(100)
    assert joint_gpu_seconds([throttle, after]) == pytest.approx(130)


LINKED = {kind: [cause.kind for cause in causes] for kind, causes in CAUSES.items() if causes}

KINDS = sorted({"loss_nan", *LINKED, *(cause for causes in LINKED.values() for cause in causes)})


def test_causes_are_runbooks_and_lead_nowhere_back() -> None:
    """A kind is never its own cause, in however many steps."""
    assert set(KINDS) <= set(CAUSES)
    TopologicalSorter(LINKED).prepare()


incidents_of_a_node = st.lists(
    st.builds(
        of,
        st.sampled_from(KINDS),
        st.sampled_from([None, 0, 1]),
        st.floats(0, 300),
        resolved_at=st.one_of(st.none(), st.floats(300, 500).map(lambda s: WALL + s)),
        summary=st.sampled_from(["ended with signal SIGKILL", "trouble"]),
    ),
    max_size=12,
    unique_by=lambda i: i.id,
)


@given(incidents_of_a_node, st.randoms(use_true_random=False))
def test_a_cause_is_never_a_symptom_and_the_order_does_not_matter(found: list[Incident], random) -> None:
    """There are roots and their symptoms and nothing in between, and a second look changes nothing."""
    current = [i for i in found if i.resolved_at is None]
    ended = [i for i in found if i.resolved_at is not None]
    links = correlate(current, ended, RANKS, WALL + 500)
    kinds = {i.id: i.kind for i in found}
    for symptom, cause in links.items():
        assert cause is None or links.get(cause) is None
        assert cause is None or kinds[symptom] != kinds[cause]
    shuffled = random.sample(current, len(current))
    assert correlate(shuffled, ended, RANKS, WALL + 500) == links
    table = linked(IncidentTable({(i.kind, i.key): i for i in current}), links)
    assert correlate(table.incidents.values(), ended, RANKS, WALL + 500) == links


@given(incidents_of_a_node, st.lists(st.sampled_from([f"{k}-{g}" for k in KINDS for g in (None, 0, 1)]), max_size=12))
def test_no_remembered_cause_however_absurd_makes_a_circle(found: list[Incident], claimed: list[str]) -> None:
    """A journal of another release may say anything; every chain still ends at a root."""
    current = [replace(i, resolved_at=None, cause=cause) for i, cause in zip(found, claimed, strict=False)]
    links = correlate(current, (), RANKS, WALL + 500)
    assert all(cause is None or links[cause] is None for cause in links.values())


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e4)), min_size=1, max_size=8))
def test_the_joint_loss_lies_between_the_largest_and_the_sum(spans: list[tuple[float, float, float]]) -> None:
    """Never less than the dearest incident, never more than all together."""
    group = [
        replace(THROTTLE, opened_at=start, last_seen_at=start + length, cost=Cost(gpu_seconds=lost))
        for start, length, lost in spans
    ]
    losses = [lost for _, _, lost in spans]
    joint = joint_gpu_seconds(group)
    assert max(losses) <= joint * (1 + 1e-6) + 1e-6
    assert joint <= sum(losses) * (1 + 1e-6) + 1e-6


# A symptom in the running agent: it does nothing, it is listed below its root, and it outlives a restart.


class Trouble:
    """A runbook of ``kind`` about GPU 2 that finds it while ``there`` and tells people about it."""

    def __init__(self, kind: str, *, there: bool = True) -> None:
        self.kind, self.there = kind, there

    def runbook(self) -> Runbook:
        tell = Action("notify", "node", reason=f"{self.kind} on GPU 2")
        return runbook(
            kind=self.kind,
            detect=self._detect,
            healed=lambda _incident, _view: not self.there,
            remedy=lambda _incident, _view: (tell,),
            clear_after_s=2.0,
        )

    def _detect(self, _view: object) -> Iterable[Finding]:
        culprit = Culprit("gpu", "node", 2, 2)
        return [finding(self.kind, culprit=culprit, data={"gpu": 2, "run": "smol"})] if self.there else []


def agent(folder: Path, *troubles: Trouble, clock: FakeClock | None = None) -> Agent:
    source = FakeCollector("source", lambda: Reading(facts=(rank(2),)))
    return Agent(folder, [source], [trouble.runbook() for trouble in troubles], clock=clock)


def listed(agent: Agent) -> list[tuple[str, list[str]]]:
    """Kind and kinds of symptoms of each current incident in the API's list."""
    found = api.incident_list(agent.loop.snapshot, ["current"])["incidents"]
    return [(i["kind"], [symptom["kind"] for symptom in i["symptoms"]]) for i in found]


def test_only_the_root_is_listed_and_acted_on(tmp_path: Path) -> None:
    """The straggler hangs below the throttle, is still found by its id, and costs nothing twice."""
    running = agent(tmp_path, Trouble("straggler"), Trouble("gpu_throttle"))
    running.tick(3)
    assert listed(running) == [("gpu_throttle", ["straggler"])]
    (root,) = api.incident_list(running.loop.snapshot, nested=True)["incidents"]
    (symptom,) = root["symptoms"]
    assert symptom["cause"] == root["id"]
    assert symptom["actions"] == []
    assert root["joint_gpu_seconds"] < root["cost"]["gpu_seconds"] + symptom["cost"]["gpu_seconds"]
    assert api.find(running.loop.snapshot, symptom["id"]) is not None


def test_a_symptom_ends_with_its_root_or_after_it(tmp_path: Path) -> None:
    """It is over first and yet stays until the throttle is over."""
    straggler, throttle = Trouble("straggler"), Trouble("gpu_throttle")
    running = agent(tmp_path, straggler, throttle)
    running.tick(3)
    straggler.there = False
    running.tick(10)
    assert listed(running) == [("gpu_throttle", ["straggler"])]
    throttle.there = False
    running.tick(10)
    assert listed(running) == []
    ended = {i.kind: i.resolved_at for i in running.loop.snapshot.ended}
    assert ended["straggler"] >= ended["gpu_throttle"]


def test_a_root_that_turns_up_later_adopts(tmp_path: Path) -> None:
    """First the straggler is an incident of its own."""
    throttle = Trouble("gpu_throttle", there=False)
    running = agent(tmp_path, Trouble("straggler"), throttle)
    running.tick(3)
    assert listed(running) == [("straggler", [])]
    throttle.there = True
    running.tick(2)
    assert listed(running) == [("gpu_throttle", ["straggler"])]


def test_the_journal_keeps_what_belongs_together(tmp_path: Path) -> None:
    """After a restart the symptom still knows its cause, and is not told again."""
    before = agent(tmp_path, Trouble("straggler"), Trouble("gpu_throttle"))
    before.tick(3)
    before.journal.close()
    after = agent(tmp_path, Trouble("straggler"), Trouble("gpu_throttle"), clock=before.clock)
    links = {i.kind: i.cause for i in after.incident_manager.current}
    assert links["straggler"] == next(i.id for i in after.incident_manager.current if i.kind == "gpu_throttle")
    after.tick(2)
    assert listed(after) == [("gpu_throttle", ["straggler"])]
