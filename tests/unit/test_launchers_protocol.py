"""The protocol of many launchers in virtual time: they agree, and what the leader does grows no faster than they do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.protocol import FREE, Costs, Launchers, run

Figures = dict[str, Any]
BUSY = Costs(encode_s=1e-5, send_s=1e-5, receive_s=2e-5, connect_s=2e-4)
FEW, MANY = 64, 256
PHASES = ("start", "quiet", "node_lost", "spare_lost", "leader_lost")


@pytest.fixture(scope="module")
def few() -> Figures:
    """What 64 launchers do."""
    return run(FEW, costs=BUSY)


@pytest.fixture(scope="module")
def many() -> Figures:
    """What 256 do."""
    return run(MANY, costs=BUSY)


@pytest.mark.parametrize("phase", PHASES)
def test_what_the_leader_sends_and_hears_grows_no_faster_than_the_run(few: Figures, many: Figures, phase: str) -> None:
    """Four times the launchers, at most four times the messages and bytes, and a little for what is fixed."""
    for what in ("sent", "received", "messages_per_s", "kb_per_s"):
        assert many[phase][what] <= 1.15 * MANY / FEW * few[phase][what], (phase, what)


def test_a_spare_that_goes_costs_no_list_of_all_members(few: Figures, many: Figures) -> None:
    """The list would have been sixteen times as many bytes for four times the launchers."""
    more = [figures["spare_lost"]["kb_per_s"] - figures["quiet"]["kb_per_s"] for figures in (few, many)]
    assert more[1] < 1.5 * MANY / FEW * max(more[0], 1.0)
    assert many["spare_lost"]["sent"] > many["quiet"]["sent"]


def test_all_agree_soon(few: Figures, many: Figures) -> None:
    """In virtual time: after a loss within the node's silence and a little."""
    for figures in (few, many):
        assert figures["start"]["seconds"] < 3
        assert figures["node_lost"]["seconds"] < 3
        assert figures["leader_lost"]["seconds"] < 4


def test_all_know_who_is_there_after_a_spare_has_gone() -> None:
    """By the changes alone: a successor would wait for nobody who has gone."""
    world = Launchers(FEW, 2)
    world.until_agreed()
    gone = world.alive[-1].name
    world.lose(gone)
    world.pass_time(5.0)
    assert {frozenset(one.members) for one in world.alive} == {frozenset(world.members) - {gone}}


def test_a_leader_that_is_busy_is_late() -> None:
    """The thread of a launcher does one thing at a time."""
    slow = Launchers(FEW, 2, replace(BUSY, receive_s=2e-3)).until_agreed()
    assert slow > Launchers(FEW, 2, FREE).until_agreed() + 0.05


def test_launchers_that_cannot_agree_are_said_to() -> None:
    """Without enough nodes for the run there is no generation."""
    world = Launchers(16)
    world.lose("n00003")
    with pytest.raises(TimeoutError, match="15 launchers agree on no generation within 5 s"):
        world.until_agreed(limit_s=5.0)
