"""Leases, fences, and folders that are full or read-only."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.checkpoints import claims
from opsd.checkpoints.claims import (
    EXIT_FENCED,
    FOLDER,
    LEASE,
    ClaimError,
    Fence,
    Fenced,
    create,
    newest,
)
from tests.fakes.claims import claim_of
from tests.fakes.tmpfs import tmpfs


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
