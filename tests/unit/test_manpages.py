"""Manual pages: groff and man take them, and they say what the command line says."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from opsd.commands.main import CHECKOUT_ONLY, COMMANDS
from tests.manpages import FOLDER, rendered


def test_each_command_has_one() -> None:
    """And those for the development of opsd have none."""
    assert {path.stem for path in rendered()} == {"opsd", *(f"opsd-{name}" for name in {*COMMANDS} - CHECKOUT_ONLY)}


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_no_complaint_and_loses_nothing() -> None:
    """Backslashes, dots at the start of a line and characters beyond ASCII are roff's own affairs."""
    command = ["groff", "-man", "-ww", "-Tutf8", "-P-cbou", "-rLL=200n", *sorted(map(str, FOLDER.glob("*.1")))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    said = " ".join(done.stdout.split())
    for words in ("--nproc-per-node N|cpu|gpu|auto", "n1=ADDRESS,n2=…", "opsd chaos corrupt-checkpoint"):
        assert words in said
