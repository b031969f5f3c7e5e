"""Claims that were damaged, or that are no regular files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from opsd.checkpoints import claims
from opsd.checkpoints.claims import (
    FOLDER,
    KEPT,
    Claim,
    Fence,
    Fenced,
    create,
    newest,
)
from tests.fakes.claims import claim_of, place_of

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
