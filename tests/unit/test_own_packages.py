"""What is a process of opsd by its command line, and whose packages come first in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsd.own_packages import foreign_last, started


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("-m opsd runbook list", "opsd"),
        ("-mopsd", "opsd"),
        ("-Im opsd", "opsd"),
        ("-ImOpsd", "Opsd"),
        ("-P -m opsd.slurm.pyslurm_worker", "opsd"),
        ("-X dev -m opsd", "opsd"),
        ("-Xdev -uW error -Bm opsd", "opsd"),
        ("-IXm -m opsd", "opsd"),
        ("--check-hash-based-pycs never -m opsd", "opsd"),
        ("/opt/opsd/bin/opsd status", "opsd"),
        ("-X importtime -- /opt/opsd/bin/opsd", "opsd"),
        ("-X opsd train.py", "train.py"),
        ("-W opsd -m train opsd", "train"),
        ("-m train -m opsd", "train"),
        ("train.py -m opsd", "train.py"),
        ("-c opsd opsd", ""),
        ("-copsd opsd", ""),
        ("-Im", ""),
        ("-X", ""),
        ("", ""),
        ("- opsd", "-"),
    ],
)
def test_what_a_command_line_of_python_starts(words: str, what: str) -> None:
    """However its options are joined: those that take a word hide no module, and what they take is none."""
    assert started(["python", *words.split()]) == what


@pytest.mark.parametrize("call", ["-m opsd", "-X utf8 -m opsd", "-Bum opsd", "-W default -mopsd"])
def test_opsd_has_its_own_packages_however_it_is_called(tmp_path: Path, call: str) -> None:
    """Where a module of another Python has put its own in front."""
    (tmp_path / "click.py").write_text("raise ImportError('that of another Python')\n")
    command, env = [sys.executable, *call.split(), "--version"], {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_own_folders_come_before_others_that_are_named() -> None:
    """A folder beside them whose name only begins like theirs is another's; what is not named stays in front."""
    paths = ["/apps/lib", "/opt/opsd-1/lib", "/opt/opsd/lib", "/opt/opsd", "/usr/lib", ""]
    named = ["/apps/lib", "/opt/opsd-1/lib", "/opt/opsd/lib", "/opt/opsd"]
    assert foreign_last(paths, named, ["/opt/opsd"]) == [
        "/usr/lib", "", "/opt/opsd/lib", "/opt/opsd", "/apps/lib", "/opt/opsd-1/lib",
    ]  # fmt: skip
    assert foreign_last(["/b", "/a"], ["/b"], ["/"]) == ["/a", "/b"]
