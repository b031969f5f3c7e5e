"""Which rank holds a hung job up."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.attribution import RankState, attribute_hang

WAITING = RankState(0, "collective", 20.0, "S", 41)


def job(*changes, count=4):
    """Ranks that wait in one collective, except for ``changes``: (rank, fields)."""
    ranks = [replace(WAITING, rank=number) for number in range(count)]
    for number, fields in changes:
        ranks[number] = replace(ranks[number], **fields)
    return ranks


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"process": "T"}, "stopped by a signal"),
        ({"process": "Z"}, "a zombie"),
        ({"process": None}, "its process is gone"),
        ({"process": "D"}, "cannot be interrupted"),
        ({"step": 40}, "it has completed step 40"),
        ({"phase": "backward"}, "it is in phase backward, the others wait for it in collective"),
        ({"phase": "data", "stuck_s": 20.2}, "it is in phase data"),
        ({"phase": "checkpoint"}, "it is in phase checkpoint"),
    ],
)
def test_the_rank_that_differs_is_named_with_the_reason(fields, said):
    """Whatever makes one rank differ from those that wait names it, and says so."""
    verdict = attribute_hang(job((2, fields)))
    assert verdict.rank == 2
    assert said in verdict.reason
    assert verdict.confidence >= 0.8


def test_a_stopped_process_counts_for_more_than_a_lower_step():
    """The kernel's word on a process is better evidence than how far its rank has come."""
    assert attribute_hang(job((1, {"process": "T"}), (3, {"step": 40}))).rank == 1


def test_a_rank_ahead_of_the_collective_is_not_to_blame():
    """Who has left the collective already waits for nobody and is waited for by nobody."""
    verdict = attribute_hang(job((0, {"phase": "optimizer"}), (2, {"phase": "forward"})))
    assert verdict.rank == 2


def test_forward_and_backward_alternate_so_the_earlier_change_decides():
    """Under gradient accumulation a rank in forward is not necessarily behind one in backward."""
    ranks = [RankState(0, "forward", 20.0, "R", 5), RankState(1, "backward", 26.0, "R", 5)]
    verdict = attribute_hang(ranks)
    assert verdict.rank == 1
    assert verdict.reason == "its page stopped changing first"


def test_ranks_that_all_wait_alike_leave_the_culprit_open():
    """If everybody here waits in the collective the cause may be elsewhere, and the confidence says so."""
    verdict = attribute_hang(job())
    assert verdict.confidence <= 0.2
    assert verdict.reason == "no rank stands out"


def test_the_only_rank_is_to_blame_unless_it_waits_for_other_nodes():
    """One rank on this node: stuck in its own work it is the culprit, in a collective it may be a victim."""
    assert attribute_hang([replace(WAITING, phase="backward")]).confidence == 0.9
    assert attribute_hang([WAITING]).confidence == 0.2
    assert attribute_hang([replace(WAITING, process="T")]).confidence == 0.9


STATES = st.builds(
    RankState,
    rank=st.integers(0, 15),
    phase=st.sampled_from(["other", "setup", "data", "forward", "backward", "collective", "optimizer", "checkpoint"]),
    stuck_s=st.floats(0, 1e4),
    process=st.sampled_from(["R", "S", "D", "T", "t", "Z", None]),
    step=st.integers(-1, 100),
)


@given(st.lists(STATES, min_size=1, max_size=16, unique_by=lambda state: state.rank), st.randoms())
def test_the_verdict_does_not_depend_on_the_order_of_the_ranks(ranks, random):
    """One of the ranks is named, evidence covers all of them with the culprit first, in whatever order they come."""
    verdict = attribute_hang(ranks)
    shuffled = list(ranks)
    random.shuffle(shuffled)
    assert verdict.rank in {state.rank for state in ranks}
    assert 0.0 < verdict.confidence <= 1.0
    assert len(verdict.evidence) == len(ranks)
    assert verdict.evidence[0].startswith(f"rank {verdict.rank}:")
    assert attribute_hang(shuffled).reason == verdict.reason
