"""Claims of generations in the folder of a run: one owner each, the highest holds, and whatever lies there is borne."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.checkpoints import claims
from opsd.checkpoints.claims import (
    KEPT,
    Claim,
    ClaimError,
    End,
    Fence,
    Fenced,
    create,
    newest,
)
from tests.fakes import claimant
from tests.fakes.claimant import no_link
from tests.fakes.claims import claim_of, names, place_of, run

LINKS: tuple[Callable[[Path, Path], None], ...] = (os.link, no_link)


@pytest.mark.parametrize("link", LINKS)
def test_a_claim_is_read_back(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    """All of it, with links and without, and nothing but the claim is left in the folder."""
    assert newest(tmp_path) is None
    assert create(tmp_path, claim_of(1, alone=True, nodes=["n1", "n2"], ranks={"n1": 8}), link)
    found = newest(tmp_path)
    assert found is not None
    assert (found.number, found.start, found.launcher, found.alone) == (1, "run, job 1.0", "n1 7", True)
    assert (found.plan, found.end) == ({"nodes": ["n1", "n2"], "ranks": {"n1": 8}}, None)
    assert found.time > 1.7e9
    assert claims.newest_number(tmp_path) == 1
    assert names(tmp_path) == ["000001.json"]


@pytest.mark.parametrize("first", LINKS)
@pytest.mark.parametrize("second", LINKS)
def test_the_first_claim_holds(tmp_path: Path, first: claims.Link, second: claims.Link) -> None:
    """Repeated by the same launcher it is theirs again, another launcher's is refused, with links and without."""
    assert create(tmp_path, claim_of(1), first)
    assert create(tmp_path, claim_of(1), second)
    assert not create(tmp_path, claim_of(1, "n2 8"), second)
    assert names(tmp_path) == ["000001.json"]


def test_a_launcher_obeys_what_it_claimed_before(tmp_path: Path) -> None:
    """With another plan the claim that others may have read is not the one that was to be made now."""
    assert create(tmp_path, claim_of(1, nodes=["n1", "n2"]))
    assert not create(tmp_path, claim_of(1, nodes=["n1"]))
    found = newest(tmp_path)
    assert found is not None and found.plan == {"nodes": ["n1", "n2"]}


def test_a_plan_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    """Numbers as keys and tuples become what JSON makes of them, which is no other plan."""
    plan = {str(number): (number, 0.1) for number in (9, 10)}
    assert create(tmp_path, Claim(1, "s", "n1 7", plan={"ranks": {9: "n1", 10: "n2"}, **plan}))
    assert create(tmp_path, Claim(1, "s", "n1 7", plan={"ranks": {9: "n1", 10: "n2"}, **plan}))
    found = newest(tmp_path)
    assert found is not None and found.plan["ranks"] == {"9": "n1", "10": "n2"}


def test_what_has_been_overtaken_cannot_be_claimed(tmp_path: Path) -> None:
    """With generation 3 begun elsewhere, neither 2 nor an earlier claim of one's own is worth anything."""
    assert create(tmp_path, claim_of(1))
    assert create(tmp_path, claim_of(3, "n2 8"))
    assert not create(tmp_path, claim_of(2))
    assert not create(tmp_path, claim_of(1))
    found = newest(tmp_path)
    assert found is not None and (found.number, found.launcher) == (3, "n2 8")


def test_a_claim_is_read_again_only_if_it_is_another_one(tmp_path: Path) -> None:
    """Or if somebody has changed it."""
    claims.create(tmp_path, Claim(1, "run", "n1-1"))
    first = claims.newest_unless(tmp_path, None)
    assert first is not None
    assert claims.newest_unless(tmp_path, first) is first
    (tmp_path / "generations/000001.json").write_text("{}")
    damaged = claims.newest_unless(tmp_path, first)
    assert damaged is not None
    assert damaged.claim.launcher == ""
    claims.create(tmp_path, Claim(2, "run", "n1-1"))
    second = claims.newest_unless(tmp_path, damaged)
    assert second is not None
    assert second.claim.number == 2


def test_the_last_word_of_a_run_is_in_its_claim(tmp_path: Path) -> None:
    """The exit code and the reason; a plan without one goes on."""
    assert create(tmp_path, claim_of(4, end={"code": 70, "reason": "the same failure came back"}))
    found = newest(tmp_path)
    assert found is not None and found.end == End(70, "the same failure came back")


@pytest.mark.parametrize("content", [{"code": "no"}, {"code": None, "reason": "r"}, [], "over", {}])
def test_an_end_that_says_nothing_is_none(content: object) -> None:
    """A plan of another version may hold anything there."""
    assert claim_of(4, end=content).end is None


def test_a_claim_is_whole_before_it_is_in_place(tmp_path: Path) -> None:
    """At the moment of the link the draft can be read and is all that the claim will be."""
    seen: list[Claim | None] = []

    def link(draft: Path, target: Path) -> None:
        assert not target.exists()
        (tmp_path / "seen").mkdir()
        place_of(tmp_path / "seen", 1).parent.mkdir()
        os.link(draft, place_of(tmp_path / "seen", 1))
        seen.append(newest(tmp_path / "seen"))
        place_of(tmp_path / "seen", 1).unlink()
        os.link(draft, target)

    assert create(tmp_path, claim_of(1, nodes=["n1"]), link)
    assert seen == [newest(tmp_path)]


def test_a_lost_answer_to_a_link_is_no_loss(tmp_path: Path) -> None:
    """An NFS client that asks twice is told that the name exists, or that there was an error: the claim is made."""

    def told_twice(draft: Path, target: Path) -> None:
        os.link(draft, target)
        os.link(draft, target)

    def broken_off(draft: Path, target: Path) -> None:
        os.link(draft, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert create(tmp_path, claim_of(1), told_twice)
    assert create(tmp_path, claim_of(2), broken_off)
    assert not create(tmp_path, claim_of(2, "n2 8"), told_twice)


def test_an_error_says_what_could_not_be_claimed(tmp_path: Path) -> None:
    """One sentence with the generation, the folder and the reason, and no draft stays."""

    def fail(draft: Path, target: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with pytest.raises(ClaimError, match=r"generation 1 cannot be claimed in .*generations: Stale file handle"):
        create(tmp_path, claim_of(1), fail)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("link", "primitive"), [(os.link, "link"), (no_link, "rename")])
def test_the_primitive_is_tried(tmp_path: Path, link: claims.Link, primitive: str) -> None:
    """Links where there are some, else folders; nothing is left of the trial."""
    assert claims.try_primitive(tmp_path, link) == primitive
    assert names(tmp_path) == []


def test_a_file_system_on_which_links_exclude_nobody_does_with_folders(tmp_path: Path) -> None:
    """Two links to one name that both succeed are worth nothing."""

    def replace(draft: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        os.link(draft, target)

    assert claims.try_primitive(tmp_path, replace) == "rename"
    assert names(tmp_path) == []


def race(folder: Path, primitives: tuple[str, ...], count: int) -> list[list[int]]:
    """The numbers that each of several processes got that claim at the same time."""
    racers = [
        subprocess.Popen(
            [sys.executable, claimant.__file__, folder, f"n{number}", str(count), primitive],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for number, primitive in enumerate(primitives)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [[int(line) for line in racer.communicate(timeout=120)[0].split()] for racer in racers]
    assert not any(racer.returncode for racer in racers)
    return won


def assert_one_owner_each(folder: Path, won: list[list[int]], count: int) -> None:
    every = [number for numbers in won for number in numbers]
    assert len(every) == len(set(every))
    assert claims.newest_number(folder) >= count
    last = newest(folder)
    assert last is not None and last.number in won[int(last.launcher.removeprefix("n"))]


@pytest.mark.slow
@pytest.mark.parametrize("primitives", [("link",) * 6, ("rename",) * 6, ("link", "rename") * 3])
def test_of_many_that_claim_at_once_one_gets_each_number(tmp_path: Path, primitives: tuple[str, ...]) -> None:
    """Six processes and 300 numbers, by links, by folders and by both at once; old claims go on the way."""
    won = race(tmp_path, primitives, 300)
    assert_one_owner_each(tmp_path, won, 300)
    assert len(names(tmp_path)) <= KEPT


MADE = {
    "ext4": (["mkfs.ext4", "-q"], ["mount"]),
    "xfs": (["mkfs.xfs", "-q"], ["mount"]),
    "btrfs": (["mkfs.btrfs", "-q"], ["mount"]),
    "exfat": (["mkfs.exfat"], ["mount.exfat-fuse"]),
}
"""How a file system is made on a disk and mounted."""


@contextmanager
def mounted(folder: Path, kind: str) -> Iterator[Path]:
    """A file system of its own at ``folder``/mounted. Needs root."""
    place, below = folder / "mounted", folder / "below"
    place.mkdir()
    below.mkdir()
    with ExitStack() as undo:
        if kind in MADE:
            make, mount = MADE[kind]
            with open(below / "disk", "wb") as file:
                file.truncate(400 << 20)
            run(*make, below / "disk")
            disk = run("losetup", "--find", "--show", below / "disk")
            undo.callback(run, "losetup", "--detach", disk)
            run(*mount, disk, place)
        elif kind == "overlay":
            run("mount", "-t", "tmpfs", "tmpfs", below)
            undo.callback(run, "umount", below)
            layers = [below / name for name in ("lower", "upper", "work")]
            for layer in layers:
                layer.mkdir()
            named = "lowerdir={},upperdir={},workdir={}".format(*layers)
            run("mount", "-t", "overlay", "overlay", "-o", named, place)
        else:
            run("mount", "-t", kind, kind, place)
        undo.callback(run, "umount", place)
        yield place


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
@pytest.mark.parametrize("kind", ["tmpfs", "overlay", *MADE])
def test_real_file_systems_exclude_a_second(tmp_path: Path, kind: str) -> None:
    """What can be mounted here, one of them without links: four processes race, two of them told to do without."""
    with mounted(tmp_path, kind) as folder:
        assert claims.try_primitive(folder) == ("rename" if kind == "exfat" else "link")
        assert_one_owner_each(folder, race(folder, ("link", "rename") * 2, 60), 60)


def test_a_thawed_launcher_holds_no_number_that_was_forgotten(tmp_path: Path) -> None:
    """Frozen before its link, it comes back when its number is free again and the run a hundred generations on."""

    def frozen(draft: Path, target: Path) -> None:
        for number in range(5, KEPT + 10):
            assert create(tmp_path, claim_of(number, "n2 8"))
        assert not target.exists()
        os.link(draft, target)

    assert not create(tmp_path, claim_of(5), frozen)
    found = newest(tmp_path)
    assert found is not None and (found.number, found.launcher) == (KEPT + 9, "n2 8")
    with pytest.raises(Fenced):
        Fence(tmp_path, 5).check()


def test_who_looks_while_claims_are_made_and_forgotten_sees_the_newest(tmp_path: Path) -> None:
    """A reader beside a writer is never told an older number than before, nor of an error."""
    done = threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not done.is_set():
            found = newest(tmp_path)
            seen.append(found.number if found else 0)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(1, 400):
        assert create(tmp_path, claim_of(number))
    done.set()
    reader.join(20)
    assert not reader.is_alive()
    assert len(seen) > 10 and seen == sorted(seen)


CLAIMS = st.lists(st.tuples(st.integers(1, 8), st.sampled_from(["n1", "n2", "n3"]), st.booleans()), max_size=25)


@settings(max_examples=150, deadline=None)
@given(CLAIMS)
def test_at_most_one_owner_and_the_highest_holds(attempts: list[tuple[int, str, bool]]) -> None:
    """Any order of claims by three launchers, with links or without: as a plain dictionary would have it."""
    owners: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, launcher, has_links in attempts:
            is_ours = create(folder, claim_of(number, launcher), os.link if has_links else no_link)
            owners.setdefault(number, launcher)
            assert is_ours == (owners[number] == launcher and number == max(owners))
            found = newest(folder)
            assert found is not None and (found.number, found.launcher) == (max(owners), owners[max(owners)])
            for fenced in range(1, 9):
                overtaken = False
                try:
                    Fence(folder, fenced).check()
                except Fenced:
                    overtaken = True
                assert overtaken == (fenced < max(owners))
