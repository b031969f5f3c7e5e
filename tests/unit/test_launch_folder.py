"""The run's folder as a launcher asks it: what takes its place, when a mount is gone, is not taken for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import pytest

from opsd.checkpoints.claims import FOLDER, Claim, newest_number
from opsd.launch.claims.claim_store import StoreRead
from opsd.launch.claims.tcp_group import FolderClaimStore
from opsd.launch.io.loop import Loop


class Answers(Loop):
    """A loop that is turned by hand: each time until one thing that was done beside it is answered."""

    def __init__(self) -> None:
        super().__init__()
        self._done: Queue[Callable[[], None]] = Queue()

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self._done.put(callback)

    def turn(self) -> None:
        self._done.get(timeout=60)()


class Asked:
    """A ``FolderClaimStore``, and what it has said."""

    def __init__(self, path: Path) -> None:
        self.said: list[str] = []
        self._looks: list[StoreRead | None] = []
        self._claims: list[bool | None] = []
        self._loop = Answers()
        self._folder = FolderClaimStore(path, self._loop, self._looks.append, self._claims.append, self.said.append)

    def read(self) -> StoreRead | None:
        self._folder.read(full=True)
        self._loop.turn()
        return self._looks.pop()

    def claim(self, number: int) -> bool | None:
        self._folder.claim(Claim(number, "run, job 1.0", "n1 7"))
        self._loop.turn()
        return self._claims.pop()


def away(path: Path) -> None:
    """The mount above is gone, and nothing lies below."""
    path.parent.rename(path.parent.with_name("real"))


def bare(path: Path) -> None:
    """The mount is gone, and an empty folder lies below."""
    path.rename(path.with_name("real"))
    path.mkdir()


@pytest.mark.parametrize("lose", [away, bare])
def test_nothing_is_claimed_where_the_mount_was(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    """Elsewhere others may claim the same number at that time: then both would go on, each with a claim of its own."""
    path = tmp_path / "mount" / "run"
    path.mkdir(parents=True)
    asked = Asked(path)
    assert asked.read() is not None and asked.claim(1) is True
    lose(path)
    assert asked.read() is None
    assert asked.claim(2) is None
    assert newest_number(path) == 0
    assert "another folder than before, without generation 1" in asked.said[0]


def test_a_folder_that_is_mounted_again_is_known_by_its_claims(tmp_path: Path) -> None:
    """A server's folder may come back as another device: the claims in it say that it is the same."""
    path = tmp_path / "run"
    path.mkdir()
    asked = Asked(path)
    assert asked.read() is not None and asked.claim(1) is True
    bare(path)
    assert asked.read() is None
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "real", path)
    found = asked.read()
    assert found is not None and found.claim is not None and found.claim.number == 1
    assert asked.claim(2) is True


def test_a_run_goes_on_in_a_folder_that_somebody_has_emptied(tmp_path: Path) -> None:
    """It is the same folder for all nodes, so the next claim excludes a second one as ever."""
    path = tmp_path / "run"
    path.mkdir()
    asked = Asked(path)
    assert asked.read() is not None and asked.claim(1) is True
    shutil.rmtree(path / FOLDER)
    assert asked.read() is not None
    assert asked.claim(2) is True
