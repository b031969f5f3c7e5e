"""Who worked on a node when something struck is known after the rank is gone."""

from dataclasses import replace

from opsd.agent.window import MAX_ENDED, SLACK_S, Holders, Window
from opsd.collectors.base import Reading
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
