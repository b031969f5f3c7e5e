"""``python -m opsd.data.worker FOLDER STAGE``: makes the attempts at tasks that come on standard input, one in a line.

Each line of standard output is the same attempt as it ended, also as JSON. What the steps print goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opsd import exitcodes
from opsd.data.pipeline import PipelineError, load
from opsd.data.records import RUN, Attempt, StageFolder, read_json

_PR_SET_PDEATHSIG = 1


def _tasks(root: Path, number: int) -> Any:
    about = read_json(root / RUN)
    if about is None:
        raise PipelineError(f"{root} is not the folder of a pipeline")
    os.chdir(about["cwd"])
    stages = load(Path(about["pipeline"]))
    if number > len(stages):
        raise PipelineError(f"{about['pipeline']} has {len(stages)} stages, and no stage {number}: it was changed")
    from opsd.data.task import Tasks

    return Tasks(stages[number - 1], StageFolder(root, number))


def main(arguments: Sequence[str]) -> int:
    """Run tasks until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        tasks = _tasks(Path(arguments[0]), int(arguments[1]))
    except PipelineError as error:
        print(json.dumps({"refused": str(error)}), file=answers)
        return exitcodes.USAGE
    for line in sys.stdin:
        print(json.dumps(asdict(tasks.run(Attempt(**json.loads(line))))), file=answers)
    return exitcodes.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
