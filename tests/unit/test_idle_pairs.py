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
    called = [line.split()[0] for line in begun(tmp_path, pairs, "(null)")]
    assert (called.count("opsd"), called.count("sbatch")) == (asked, submitted)


@pytest.mark.parametrize(
    ("gres", "asked"),
    [
        ("gpu:h100:8(S:0-1)\\ngpu:h100:8(S:0,1)", "--gres=gpu:8 "),
        ("gpu:h100:8(S:0-1)\\ngpu:a:2(S:0,2),gpu:b:3,shard:20", "--gres=gpu:5 "),
        ("gpu:8\\n(null)", ""),
        ("(null)\\n(null)", ""),
    ],
)
def test_a_pair_asks_for_the_gpus_that_both_nodes_have(tmp_path: Path, gres: str, asked: str) -> None:
    """With those of the batch host alone a step failed where the other node has fewer, again and again."""
    (pair,) = [line for line in begun(tmp_path, "1", gres) if "n[3-4]" in line]
    assert f"--wrap=exec srun {asked or ' '}{tmp_path}/opsd preflight network --note" in pair


def begun(folder: Path, pairs: str, gres: str) -> list[str]:
    """How the script calls its commands, where sinfo says that two nodes have ``gres``."""
    sinfo = f"#!/bin/sh\nprintf '{gres}\\n'\n"
    for name, text in (("opsd", OPSD), ("sbatch", CALLED), ("scancel", CALLED), ("sinfo", sinfo)):
        program = folder / name
        program.write_text(text.format(folder=folder) if name != "sinfo" else text)
        program.chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "OPSD": str(folder / "opsd"), "PAIRS": pairs}
    done = subprocess.run(["sh", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return (folder / "called").read_text().splitlines()
