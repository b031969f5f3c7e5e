"""The knowledge base: like incidents are found, and how they went is told as it was."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.similar_incidents import nearest, signature, similarity, statistics
from opsd.runbooks.base import Culprit, Evidence, State
from tests.fakes.incidents import WALL, incident


def xid(id: str, code: int, gpu: int = 0, **changes: object):
    """An ended incident about an Xid."""
    fields = {"kind": "gpu_xid", "summary": f"GPU {gpu} (00000000:1A:00.0): Xid {code}", "resolved_at": WALL + 60}
    return incident(id, culprit=Culprit("gpu", "n01", gpu, detail=f"Xid {code}"), **{**fields, **changes})


def test_the_same_xid_is_nearer_than_another_one_and_that_nearer_than_another_kind() -> None:
    """Kind, then reason, then place."""
    past = [
        incident("other", resolved_at=WALL),
        xid("another code", 48),
        xid("same code elsewhere", 79, 3),
        xid("same", 79),
    ]
    found = nearest(xid("now", 79, resolved_at=None), past)
    assert [similar.incident.id for similar in found] == ["same", "same code elsewhere", "another code"]
    assert found[0].similarity == 1


def test_a_past_incident_says_what_was_done_and_whether_it_helped() -> None:
    """An attempt that ended in escalation has not helped; without an attempt nothing is known."""
    past = [
        xid("a", 79, state=State.RESOLVED, attempts=1, opened_at=WALL - 1),
        xid("b", 79, state=State.ESCALATED, attempts=2, opened_at=WALL - 2),
        xid("c", 79, state=State.RESOLVED, opened_at=WALL - 3, actions=()),
    ]
    told = [(similar.done, similar.helped) for similar in nearest(xid("now", 79), past)]
    assert told == [(("kill_process",), True), (("kill_process",), False), ((), None)]


def test_incidents_that_are_not_over_teach_nothing() -> None:
    """Nobody knows yet whether what is done about them helps."""
    assert nearest(xid("now", 79), [xid("also now", 79, resolved_at=None), xid("now", 79)]) == []


def test_exceptions_and_signals_are_reasons_and_numbers_are_not() -> None:
    """The step at which a rank crashed says nothing about the next crash, the exception does."""
    crash = incident(
        kind="rank_crash",
        summary="rank 3 ended after step 812",
        evidence=(
            Evidence("torch.OutOfMemoryError: CUDA out of memory", "launcher", WALL),
            Evidence("signal SIGABRT", "", WALL),
        ),
    )
    features = signature(crash)
    assert {"exception OutOfMemoryError", "signal SIGABRT"} <= features.keys()
    assert not any("812" in feature for feature in features)


features = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 3), max_size=6)


@given(features, features)
def test_similarity_is_symmetric_and_between_nothing_and_the_same(one: dict[str, float], other: dict[str, float]):
    """1 for itself, the same both ways, 0 without anything in common."""
    assert similarity(one, other) == similarity(other, one)
    assert 0 <= similarity(one, other) <= 1
    assert similarity(one, one) == (1 if one else 0)
    assert (similarity(one, other) > 0) == bool(one.keys() & other.keys())


def test_statistics_count_each_kind_and_leave_symptoms_out() -> None:
    """Medians over what is known, shares over what is over."""
    evidence = (Evidence("x", "y", WALL - 4),)
    group = [
        xid("a", 79, state=State.RESOLVED, evidence=evidence, resolved_at=WALL + 10),
        xid("b", 79, state=State.RESOLVED, attempts=1, evidence=evidence, resolved_at=WALL + 30),
        xid("c", 79, state=State.ESCALATED, attempts=2, evidence=evidence, resolved_at=WALL + 50),
        xid("d", 79, state=State.RESOLVED, evidence=evidence, resolved_at=WALL + 50),
        xid("e", 79, resolved_at=None, evidence=()),
    ]
    symptom = replace(group[0], id="f", kind="rank_crash", cause="a")
    (record,) = statistics([*group, symptom])
    assert (record.kind, record.count, record.detect_s, record.resolve_s) == ("gpu_xid", 5, 4, 40)
    assert (record.by_itself, record.by_action, record.escalated) == (0.5, 0.25, 0.25)


def test_without_anything_over_there_are_no_medians() -> None:
    """Unknown is not zero."""
    (record,) = statistics([xid("a", 79, resolved_at=None, evidence=())])
    assert (record.detect_s, record.resolve_s, record.by_itself) == (None, None, 0)
