"""Claims of generations in the folder of a run: one owner each, and none may write who has been overtaken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.checkpoints.lease import (
    FOLDER,
    KEPT,
    LAUNCHER,
    START,
    Fence,
    Fenced,
    LeaseError,
    claim,
    newest,
    overtaken,
)

OURS = {"run": "r", "job": "7", "node": "n1"}
THEIRS = {**OURS, "node": "n2"}


def test_a_generation_has_one_owner(tmp_path: Path) -> None:
    """The first claim holds, also when it is repeated; another launcher's is refused."""
    assert newest(tmp_path) == 0
    assert claim(tmp_path, 1, OURS)
    assert claim(tmp_path, 1, OURS)
    assert not claim(tmp_path, 1, THEIRS)
    assert newest(tmp_path) == 1
    recorded = json.loads((tmp_path / FOLDER / "000001.json").read_text())
    assert recorded.items() >= {**OURS, "number": 1}.items()
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["000001.json"]


def test_what_has_been_overtaken_cannot_be_claimed(tmp_path: Path) -> None:
    """With generation 3 begun elsewhere, neither 2 nor an earlier claim of one's own is worth anything."""
    assert claim(tmp_path, 1, OURS)
    assert claim(tmp_path, 3, THEIRS)
    assert not claim(tmp_path, 2, OURS)
    assert not claim(tmp_path, 1, OURS)


def test_a_later_claim_fences(tmp_path: Path) -> None:
    """A generation may write until a higher number has been claimed, and then never again."""
    fence = Fence(tmp_path, 1)
    fence.check()
    assert claim(tmp_path, 1, OURS)
    fence.check()
    assert claim(tmp_path, 2, THEIRS)
    with pytest.raises(Fenced, match="generation 2 of the run has begun elsewhere; generation 1 may not write"):
        fence.check()
    Fence(tmp_path, 2).check()


def test_a_launcher_without_fellows_is_not_in_its_own_way(tmp_path: Path) -> None:
    """What its generation 1 still saves while 2 begins may be completed, until another launcher claims the run."""
    alone = {**OURS, LAUNCHER: "4711-99"}
    assert claim(tmp_path, 1, alone)
    assert claim(tmp_path, 2, alone)
    Fence(tmp_path, 1).check()
    assert not Fence(tmp_path, 2).shuts_out_saves()
    assert claim(tmp_path, 3, {**OURS, LAUNCHER: "5822-99"})
    for number in (1, 2):
        with pytest.raises(Fenced, match="generation 3 of the run has begun elsewhere"):
            Fence(tmp_path, number).check()
    assert claim(tmp_path, 4, OURS)
    assert Fence(tmp_path, 4).shuts_out_saves()


def test_only_ranks_of_a_launcher_have_a_fence(tmp_path: Path) -> None:
    """The environment of a rank says its folder and generation; without them there is nothing to be fenced by."""
    environ = {"OPSD_RUN_DIR": str(tmp_path), "OPSD_GENERATION": "4"}
    assert Fence.of(environ) == Fence(tmp_path, 4)
    assert Fence.of({"OPSD_GENERATION": "4"}) is None
    assert Fence.of({}) is None


def test_old_claims_go(tmp_path: Path) -> None:
    """A run of weeks does not fill its folder: the newest claims stay."""
    for number in range(1, KEPT + 20):
        assert claim(tmp_path, number, OURS)
    kept = sorted(int(path.stem) for path in (tmp_path / FOLDER).iterdir())
    assert kept == list(range(20, KEPT + 20))


RACE = """
import sys
from pathlib import Path
from opsd.checkpoints.lease import claim
folder, node = Path(sys.argv[1]), sys.argv[2]
sys.stdin.readline()
for number in range(1, 201):
    print(int(claim(folder, number, {"node": node})))
"""


def test_of_racing_launchers_at_most_one_wins(tmp_path: Path) -> None:
    """Two processes that claim the same numbers at the same time never both get one."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, tmp_path, node], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for node in ("n1", "n2")
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    first, second = ([int(line) for line in racer.communicate(timeout=60)[0].split()] for racer in racers)
    assert len(first) == len(second) == 200
    assert max(one + other for one, other in zip(first, second, strict=True)) == 1
    assert newest(tmp_path) == 200


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_shared_folder_is_named(disk: Path) -> None:
    """One sentence with the generation, the folder and the reason; nothing half-claimed is left."""
    with open(disk / "filler", "wb") as file, pytest.raises(OSError, match="No space left"):
        file.write(bytes(1 << 20))
    with pytest.raises(LeaseError, match=rf"generation 1 cannot be claimed in {disk}.*: No space left on device"):
        claim(disk, 1, OURS)
    assert newest(disk) == 0


def test_a_read_only_shared_folder_is_named(disk: Path) -> None:
    """Neither a claim nor a look at the claims is taken for a yes where nothing can be written."""
    assert claim(disk, 1, OURS)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(LeaseError, match=r"generation 2 cannot be claimed.*: Read-only file system"):
        claim(disk, 2, OURS)
    with pytest.raises(LeaseError, match=r"whether generation 1 may write cannot be seen.*: Read-only file system"):
        Fence(disk, 1).check()
    assert newest(disk) == 1


def test_a_start_is_overtaken_by_another_start_only(tmp_path: Path) -> None:
    """Launchers of one start take turns as head; the claim of another copy of the run ends them all."""
    assert not overtaken(tmp_path, "run, job 1.0")
    assert claim(tmp_path, 1, {"node": "n1", START: "run, job 1.0"})
    assert claim(tmp_path, 2, {"node": "n2", START: "run, job 1.0"})
    assert not overtaken(tmp_path, "run, job 1.0")
    assert claim(tmp_path, 3, {"node": "n7", START: "run, job 2.0"})
    assert overtaken(tmp_path, "run, job 1.0")
    assert not overtaken(tmp_path, "run, job 2.0")
