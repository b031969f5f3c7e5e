"""The plan of a run of the included trainer, which `opsd launch` has kept in the run's folder when it starts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from opsd.launch.ranks.settings import Program
from opsd.ledger.records import PLAN
from opsd.plan.hardware import kind_of
from opsd.slurm.requeue_helper import OPSD

TRAINER = "opsd.trainer"
_MODEL = re.compile(r"^Model:\s*(\S.*)$", re.MULTILINE)


def keep_plan(program: Program, folder: Path, gpus: int) -> None:
    """Start `opsd plan` for a run on ``gpus`` GPUs, unless it has a plan or nothing can be planned; waits for nothing.

    It is begun before the ranks, and so none of what the launcher ends with them.
    """
    if words := plan_command(program, folder, gpus):
        quiet = subprocess.DEVNULL
        subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def plan_command(program: Program, folder: Path, gpus: int, proc: str = "/proc") -> list[str]:
    """What keeps the plan of the run in ``folder``; empty for other programs, unknown GPUs, and a run that has one."""
    if (program.kind, program.name) != ("module", TRAINER) or (folder / PLAN).exists():
        return []
    if (kind := _kind_of_gpus(proc)) is None:
        return []
    given = [word for word in program.args if word != "--fresh"]
    options = ["--as-is", "--gpus", str(gpus), "--gpu", kind, "--run", str(folder)]
    return [*OPSD, "plan", *options, *given]


def _kind_of_gpus(proc: str) -> str | None:
    """The kind of the first GPU that the NVIDIA driver lists here, None if plans do not know it."""
    for file in sorted(Path(proc, "driver/nvidia/gpus").glob("*/information")):
        try:
            found = _MODEL.search(file.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return None
        return kind_of(found[1]) if found else None
    return None
