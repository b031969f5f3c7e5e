"""Claims of generations in the folder of a run: one owner each, the highest holds, and damage is refused."""

from __future__ import annotations

import errno
import json
import os
import socket
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

from opsd import exitcodes
from opsd.checkpoints import claims
from opsd.checkpoints.claims import (
    EXIT_FENCED,
    FOLDER,
    KEPT,
    LEASE,
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
from tests.fakes.tree import tmpfs

# Claims of generations in the folder of a run: one owner each, the highest holds, and whatever lies there is borne.


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


# Claims that were damaged, or that are no regular files.


NOT_OURS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "garbage": lambda path: path.write_bytes(os.urandom(400)),
    "a list": lambda path: path.write_bytes(b"[1, 2]"),
    "another shape": lambda path: path.write_bytes(b'{"number": {"a": 1}, "plan": 7}'),
    "not a number": lambda path: path.write_bytes(b'{"number": NaN, "time": 1e999}'),
    "deep": lambda path: path.write_bytes(b'{"plan":' + b"[" * 200_000),
    "huge": lambda path: os.truncate(path, claims.MAX_BYTES * 200),
    "another number": lambda path: path.write_bytes(path.read_bytes().replace(b'"number": 5', b'"number": 6')),
    "without its checksum": lambda path: path.write_bytes(path.read_bytes().replace(b"checksum", b"chocksum")),
}


@pytest.mark.parametrize("change", NOT_OURS.values(), ids=NOT_OURS.keys())
def test_a_damaged_claim_counts_and_says_nothing(tmp_path: Path, change: Callable[[Path], object]) -> None:
    """It is nobody's, it fences those before it, and the next number can be claimed."""
    assert create(tmp_path, claim_of(4))
    assert create(tmp_path, claim_of(5, nodes=["n1"]))
    change(place_of(tmp_path, 5))
    found = newest(tmp_path)
    assert found == Claim(5, "", "")
    assert not create(tmp_path, claim_of(5))
    with pytest.raises(Fenced):
        Fence(tmp_path, 4).check()
    Fence(tmp_path, 5).check()
    assert Fence(tmp_path, 5).shuts_out_saves()
    assert create(tmp_path, claim_of(6))


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


NO_FILES: dict[str, Callable[[Path], object]] = {
    "an empty folder": lambda path: path.mkdir(),
    "a folder of others": lambda path: (path / "theirs").mkdir(parents=True),
    "a folder in a folder": lambda path: (path / "claim.json").mkdir(parents=True),
    "a pipe": os.mkfifo,
    "a socket": put_socket,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to a folder": lambda path: path.symlink_to("/etc"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES.keys())
def test_what_is_no_file_is_a_claim_of_nobody(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """Nothing of it is waited for or followed, and it goes like other old claims if it can be removed."""
    os.chdir(tmp_path)  # the path of a socket must be short
    assert create(tmp_path, claim_of(1))
    make(Path(FOLDER) / "000002.json")
    assert newest(tmp_path) == Claim(2, "", "")
    assert create(tmp_path, claim_of(3))
    assert create(tmp_path, claim_of(KEPT + 3))
    found = newest(tmp_path)
    assert found is not None and (found.number, found.launcher) == (KEPT + 3, "n1 7")
    assert not place_of(tmp_path, 1).exists() and not place_of(tmp_path, 3).exists()
    assert Path("/etc").is_dir()


def test_names_that_are_no_claims_are_none(tmp_path: Path) -> None:
    """Notes of people, drafts, other ways to write a number: none of them fences anybody."""
    assert create(tmp_path, claim_of(1))
    for name in ("9.json", "0000009.json", "٠٠٠٠٠٩.json", "000000.json", "000009.json.bak", "-00009.json", "x.json"):
        (tmp_path / FOLDER / name).write_text("{}")
    assert claims.newest_number(tmp_path) == 1
    Fence(tmp_path, 1).check()


def test_no_flipped_bit_makes_another_claim(tmp_path: Path) -> None:
    """Whichever it is, the claim reads as it was made or as nobody's."""
    assert create(tmp_path, claim_of(1, alone=True, nodes=["n1", "n2"], steps=0.1))
    made, place = newest(tmp_path), place_of(tmp_path, 1)
    content = place.read_bytes()
    unchanged = 0
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        place.write_bytes(changed)
        found = newest(tmp_path)
        assert found in (made, Claim(1, "", ""))
        unchanged += found == made
    assert unchanged < 20  # a space that became another white space, for instance


def test_a_claim_of_a_launcher_without_plans_is_read(tmp_path: Path) -> None:
    """Those of the version before: a launcher that named itself was the only one, and they carry no checksum."""
    (tmp_path / FOLDER).mkdir()
    old = {"run": "r", "job": "7", "node": "n1", "number": 1, "time": 1.7e9}
    place_of(tmp_path, 1).write_text(json.dumps({**old, "launcher": "4711-99"}) + "\n")
    assert newest(tmp_path) == Claim(1, "", "4711-99", alone=True, time=1.7e9)
    place_of(tmp_path, 2).write_text(json.dumps({**old, "number": 2, "start": "r, job 7.0"}) + "\n")
    assert newest(tmp_path) == Claim(2, "r, job 7.0", "", time=1.7e9)
    with pytest.raises(Fenced):
        Fence(tmp_path, 1).check()


def test_a_claim_that_may_not_be_read_is_no_answer(tmp_path: Path) -> None:
    """A file of another user is not taken for a damaged one: the sentence names the folder and the reason."""
    if os.geteuid() == 0:
        argv = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c", LOOK, str(tmp_path)]
    else:
        argv = [sys.executable, "-c", LOOK, str(tmp_path)]
    assert create(tmp_path, claim_of(1))
    place_of(tmp_path, 1).chmod(0)
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        if folder.owner() == tmp_path.owner() and folder != Path(tempfile.gettempdir()):
            folder.chmod(0o755)
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.stdout == f"the generations of the run cannot be read in {tmp_path / FOLDER}: Permission denied\n"


LOOK = """
import sys
from pathlib import Path
from opsd.checkpoints.claims import ClaimError, newest
try:
    print(newest(Path(sys.argv[1])))
except ClaimError as error:
    print(error.strerror)
"""


# Leases, fences, and folders that are full or read-only.


def test_the_lease_says_who_goes_on(tmp_path: Path) -> None:
    """The last number and beat; before the first there are none, and claims do not take it for one of them."""
    assert claims.lease(tmp_path) == (0, 0)
    assert create(tmp_path, claim_of(3))
    for beat in (7, 1_800_000_000_000_000_000, 8):
        claims.renew(tmp_path, 3, beat)
        assert claims.lease(tmp_path) == (3, beat)
    assert claims.newest_number(tmp_path) == 3


@pytest.mark.parametrize(
    "content",
    [b"", b'{"number":         3, "be', b"[]", b'{"number": 1e999, "beat": 0}', b"[" * 5000, b'{"number": NaN}'],
)
def test_a_torn_lease_is_none(tmp_path: Path, content: bytes) -> None:
    """A reader in the middle of a write learns nothing, and is not stopped."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / LEASE).write_bytes(content)
    assert claims.lease(tmp_path) == (0, 0)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_lease_that_is_no_file_is_named(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """It is neither waited for nor followed."""
    (tmp_path / FOLDER).mkdir()
    make(tmp_path / FOLDER / LEASE)
    assert claims.lease(tmp_path) == (0, 0)
    with pytest.raises(ClaimError, match="the lease cannot be renewed"):
        claims.renew(tmp_path, 1, 1)


def test_a_later_claim_fences(tmp_path: Path) -> None:
    """A generation may write until a higher number has been claimed, and then never again."""
    fence = Fence(tmp_path, 1)
    fence.check()
    assert create(tmp_path, claim_of(1))
    fence.check()
    assert create(tmp_path, claim_of(2, "n2 8"))
    with pytest.raises(Fenced, match="generation 2 of the run has begun elsewhere; generation 1 may not write"):
        fence.check()
    Fence(tmp_path, 2).check()


def test_the_only_launcher_is_not_fenced_by_itself(tmp_path: Path) -> None:
    """What its generation 1 still saves while 2 begins may be completed, until another launcher claims the run."""
    assert create(tmp_path, claim_of(1, alone=True))
    assert create(tmp_path, claim_of(2, alone=True))
    Fence(tmp_path, 1).check()
    assert not Fence(tmp_path, 2).shuts_out_saves()
    assert create(tmp_path, claim_of(3, "n2 8", alone=True))
    for number in (1, 2):
        with pytest.raises(Fenced, match="generation 3 of the run has begun elsewhere"):
            Fence(tmp_path, number).check()
    assert create(tmp_path, claim_of(4, alone=True))
    with pytest.raises(Fenced):  # between 2 and 4 another launcher went on from what was there
        Fence(tmp_path, 2).check()
    assert create(tmp_path, claim_of(5))
    assert Fence(tmp_path, 5).shuts_out_saves()


def test_only_ranks_of_a_launcher_have_a_fence(tmp_path: Path) -> None:
    """The environment of a rank says its folder and generation; without them there is nothing to be fenced by."""
    environ = {"OPSD_RUN_DIR": str(tmp_path), "OPSD_GENERATION": "4"}
    assert Fence.of(environ) == Fence(tmp_path, 4)
    assert Fence.of({"OPSD_GENERATION": "4"}) is None
    assert Fence.of({}) is None


def test_a_file_server_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    """A look that fails is tried again as long as it was told to, and then says what cannot be seen."""
    (tmp_path / FOLDER).write_text("in the way")
    fence = Fence(tmp_path, 1)
    with pytest.raises(ClaimError, match="whether generation 1 may write cannot be seen"):
        fence.check(patience_s=0.01)
    timer = threading.Timer(0.5, (tmp_path / FOLDER).unlink)
    timer.start()
    fence.check(patience_s=60)
    timer.join()
    assert create(tmp_path, claim_of(2))
    with pytest.raises(Fenced):
        fence.check(patience_s=60)


def test_a_rank_of_the_past_does_not_start(tmp_path: Path) -> None:
    """The trainer ends with the documented code and a sentence before it has opened or joined anything."""
    assert create(tmp_path, claim_of(5))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPSD_RUN_DIR": str(tmp_path), "OPSD_GENERATION": "4"}
    argv = [sys.executable, "-m", "opsd.trainer", "tiny"]
    done = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == exitcodes.FENCED == EXIT_FENCED
    assert done.stderr.startswith("opsd: generation 5 of the run has begun elsewhere")
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    with tmpfs(tmp_path / "disk", "size=64k") as disk:
        yield disk


def test_a_full_shared_folder_is_named(disk: Path) -> None:
    """One sentence with the generation, the folder and the reason; nothing half-claimed is left."""
    with open(disk / "filler", "wb") as file, pytest.raises(OSError, match="No space left"):
        file.write(bytes(1 << 20))
    with pytest.raises(ClaimError, match=rf"generation 1 cannot be claimed in {disk}.*: No space left on device"):
        create(disk, claim_of(1))
    assert newest(disk) is None


def test_the_end_of_a_run_is_claimed_on_a_disk_that_has_become_full(disk: Path) -> None:
    """Its last checkpoint may have filled it: a finished run is not to be taken for one that has died.

    Also after restarts there, although others take all that a claim has left of the room.
    """
    subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
    assert create(disk, claim_of(1))
    for number in (2, 3, 4):
        with open(disk / f"filler-{number}", "wb") as file, pytest.raises(OSError, match="No space left"):
            file.write(bytes(2 << 20))
        assert create(disk, claim_of(number))
        found = newest(disk)
        assert found is not None and found.number == number


def test_a_read_only_shared_folder_can_be_looked_into(disk: Path) -> None:
    """But nothing is claimed there, and a rank is not told that it may write."""
    assert create(disk, claim_of(1))
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(ClaimError, match=r"generation 2 cannot be claimed.*: Read-only file system"):
        create(disk, claim_of(2))
    with pytest.raises(ClaimError, match=r"whether generation 1 may write cannot be seen.*: Read-only file system"):
        Fence(disk, 1).check()
    found = newest(disk)
    assert found is not None and found.number == 1
