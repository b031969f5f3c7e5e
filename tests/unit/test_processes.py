"""Looking processes up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from opsd.collectors.lib.processes import DEAD, process_letter, sees_all_processes
from tests.fakes.clock import eventually


def test_a_process_lives_becomes_a_zombie_and_is_gone() -> None:
    """A zombie still has its number, and is as dead as one that has none any more."""
    assert process_letter(os.getpid()) not in DEAD
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        assert eventually(lambda: process_letter(child.pid) == "Z")
    assert process_letter(child.pid) is None
    assert {"Z", None} <= set(DEAD)


def test_names_of_processes_do_not_matter(tmp_path: Path) -> None:
    """A name may hold spaces and brackets."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text("7 (a) R (b) D 1 7 7")
    assert process_letter(7, tmp_path) == "D"
    (tmp_path / "7/stat").write_text("")
    assert process_letter(7, tmp_path) is None


def test_without_a_proc_of_the_initial_namespace_not_all_are_seen(tmp_path: Path) -> None:
    """A folder that is no such namespace, or none at all."""
    assert not sees_all_processes(tmp_path)
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    assert not sees_all_processes(tmp_path)
