"""The head claims its generations in the run's folder, and gives way to another copy of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.checkpoints import lease
from opsd.launch.claims.fence import FolderFence
from opsd.launch.run.claims import LOOK_S, REFUSED, Claims
from tests.fakes.head import Stage

OURS = {"run": "r", "job": "1", "node": "n1", lease.START: "r, job 1.0"}
OTHERS = {"run": "r", "job": "2", "node": "n7", lease.START: "r, job 2.0"}


class Leader:
    """The claims of a launcher whose head's part is at work; ``left`` is how the launcher has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stage = Stage.at_work(folder)
        self.left: list[tuple[int, str]] = []
        self.granted: list[int] = []
        fence = FolderFence(folder, OURS)
        self.claims = Claims(self.stage.loop, fence, lambda: self.stage.head, lambda *end: self.left.append(end))  # type: ignore[arg-type]

    def claim(self, number: int) -> None:
        self.claims.claim(number, lambda: self.granted.append(number))
        self.stage.loop.settle()

    def look(self) -> None:
        self.stage.loop.advance(LOOK_S)
        self.stage.loop.settle()


@pytest.fixture
def leader(tmp_path: Path) -> Leader:
    """A head that has claimed its first generation."""
    leader = Leader(tmp_path)
    leader.claim(1)
    assert leader.granted == [1]
    return leader


def test_another_copy_is_noticed_while_all_goes_well(leader: Leader) -> None:
    """Its ranks would go on for nothing: no checkpoint of theirs could be committed any more."""
    leader.claims.watch()
    leader.look()
    assert not leader.stage.over
    assert lease.claim(leader.folder, 2, OTHERS)
    leader.look()
    assert leader.stage.over == [(exitcodes.FENCED, "another copy of this run has begun in its folder; this one stops")]


def test_another_copy_is_not_overtaken_again(leader: Leader) -> None:
    """A refused claim is not tried with a higher number if the newest generation is another copy's."""
    assert lease.claim(leader.folder, 2, OTHERS)
    leader.claim(2)
    assert leader.granted == [1]
    assert [code for code, _ in leader.stage.over] == [exitcodes.FENCED]


def test_a_head_that_was_cut_off_may_have_claimed_the_number(leader: Leader) -> None:
    """One of the same start: the next number is proposed, but not for ever."""
    proposed = len(leader.stage.quorum.proposals)
    for number in range(2, 3 + REFUSED):
        assert lease.claim(leader.folder, number, {**OURS, "node": "n2"})
        leader.claim(number)
    assert not leader.stage.over
    assert len(leader.stage.quorum.proposals) == proposed + REFUSED
    assert leader.left == [(exitcodes.FAILED, "another launcher of this run has claimed generation 5 or a later one")]


def test_a_folder_that_cannot_be_written(leader: Leader) -> None:
    """No generation begins that could not save."""
    for claim in (leader.folder / lease.FOLDER).iterdir():
        claim.unlink()
    (leader.folder / lease.FOLDER).rmdir()
    (leader.folder / lease.FOLDER).write_text("")
    leader.claim(2)
    [(code, reason)] = leader.left
    assert (code, leader.granted) == (exitcodes.FAILED, [1]) and "cannot be written" in reason
