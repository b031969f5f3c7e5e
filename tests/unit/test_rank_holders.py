"""Who worked on a node when something struck is known after the rank is gone."""

from dataclasses import replace

import pytest

from opsd.agent.window import MAX_ENDED, SLACK_S, Holders, Window
from opsd.collectors.base import Event, GpuFact, Reading
from opsd.runbooks import RUNBOOKS
from tests.fakes.facts import rank

T0 = 1_700_000_000.0
RANK = rank(2, pid=77)
GONE = replace(RANK, process=None)


def test_a_rank_that_is_gone_was_there_at_the_time_of_the_event():
    """Its page is removed, or its process is, before an incident is judged."""
    holders = Holders()
    holders.note([RANK], T0)
    holders.note([GONE], T0 + 60)
    assert [fact.job for fact in holders.at(T0 + 30)] == ["4242"]
    assert holders.at(T0 + 60 + SLACK_S + 1) == []
    assert holders.at(T0 - SLACK_S - 1) == []


def test_nobody_leaves_while_the_pages_cannot_be_read():
    """A blind collector is no evidence that ranks ended."""
    holders = Holders()
    holders.note([RANK], T0)
    assert [fact.rank for fact in holders.at(T0 + 300)] == [2]


def test_stays_move_with_the_wall_clock():
    """The events that are looked up are moved as well."""
    holders = Holders()
    holders.note([RANK], T0)
    holders.note([], T0 + 10)
    holders.shift(-3600.0)
    assert holders.at(T0 + 5) == []
    assert len(holders.at(T0 + 5 - 3600)) == 1


def test_those_that_left_are_bounded():
    """A launcher that restarts without end fills no memory."""
    holders = Holders()
    for pid in range(MAX_ENDED + 50):
        holders.note([replace(RANK, pid=pid)], T0)
    assert len(holders.at(T0)) == MAX_ENDED + 1


def test_the_window_tells_who_was_there():
    """Also when the ranks' collector has failed since."""
    window = Window("node", seconds=60)
    window.begin(0.0, T0)
    window.add("ranks", Reading(facts=(RANK,)))
    window.begin(1.0, T0 + 1)
    window.forget("ranks")
    assert [fact.pid for fact in window.ranks_then(T0 + 1)] == [77]
    assert [fact.pid for fact in window.witnessed.ranks_then(T0 + 1)] == [77]


EVENTS = {
    "rank_crash": ("rank_exited", {"culprit": True, "exit": "signal SIGKILL", "step": 7}),
    "rank_hang": ("hang_detected", {"stuck_s": 20.0, "phase": "forward", "reason": "rank 2: it sleeps"}),
    "straggler": ("straggler_found", {"ranks": [2], "cause": "slow GPU", "slowdown": 1.4}),
    "replica_divergence": (
        "replicas_differ",
        {"step": 40, "tensor": "head", "ranks": [0, 1, 2], "checksums": ["a", "a", "b"]},
    ),
    "silent_corruption": (
        "replay_differs",
        {"step": 40, "ranks": [2], "checksums": ["a", "b"], "repeats": 3, "differing": 1},
    ),
}


@pytest.mark.parametrize("kind", EVENTS)
def test_evidence_that_is_read_late_names_the_gpu_of_its_time(kind):
    """The launcher has started the rank again meanwhile, and it has no page yet."""
    name, data = EVENTS[kind]
    window = Window("node", seconds=600)
    window.begin(0.0, T0)
    window.add("ranks", Reading(facts=(replace(RANK, gpu=5),)))
    event = Event(name, T0 + 1.0, "", {"run": RANK.run, "generation": RANK.generation, "rank": 2, **data})
    window.begin(30.0, T0 + 30)
    window.add("ranks", Reading(events=(event,), facts=(rank(3),)))
    book = next(book for book in RUNBOOKS if book.kind == kind)
    assert [(found.culprit.gpu, found.culprit.rank) for found in book.detect(window)] == [(5, 2)]


def test_an_xid_names_the_rank_that_it_has_ended():
    """It is read when that rank is gone and its successor has no page yet, or another run has the GPU."""
    window = Window("node", seconds=600)
    gpu = GpuFact(5, "GPU-5", "00000000:5A:00.0", "H100")
    window.begin(0.0, T0)
    window.add("ranks", Reading(facts=(replace(RANK, gpu=5),)))
    xid = Event("xid", T0 + 1.0, "Xid 94", {"code": 94, "pci_bus_id": gpu.pci_bus_id, "action": "restart_app"})
    window.begin(8.0, T0 + 8)
    window.add("ranks", Reading(facts=(replace(RANK, gpu=5, run="next", job="1", rank=0),)))
    window.add("nvml", Reading(events=(xid,), facts=(gpu,)))
    book = next(book for book in RUNBOOKS if book.kind == "gpu_xid")
    assert [(found.culprit.gpu, found.culprit.rank, found.job) for found in book.detect(window)] == [(5, 2, "4242")]
