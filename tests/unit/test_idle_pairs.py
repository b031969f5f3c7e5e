"""What deploy/slurm/idle-checks.sh submits, with commands that only write down how they were called."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/idle-checks.sh"
CALLED = '#!/bin/sh\necho "$(basename "$0") $*" >>{folder}/called\n'
OPSD = CALLED + 'case "$*" in *--pairs*) echo "n[3-4]";; *) echo n1;; esac\n'


@pytest.mark.parametrize(("pairs", "asked", "submitted"), [("1", 2, 2), ("0", 1, 1)])
def test_pairs_can_be_turned_off(tmp_path: Path, pairs: str, asked: int, submitted: int) -> None:
    """With PAIRS=0 nobody asks for pairs; nodes are tested as ever."""
    for name, text in (("opsd", OPSD), ("sbatch", CALLED), ("scancel", CALLED)):
        program = tmp_path / name
        program.write_text(text.format(folder=tmp_path))
        program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OPSD": str(tmp_path / "opsd"), "PAIRS": pairs}
    done = subprocess.run(["sh", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    called = [line.split()[0] for line in (tmp_path / "called").read_text().splitlines()]
    assert (called.count("opsd"), called.count("sbatch"), done.stderr) == (asked, submitted, "")
