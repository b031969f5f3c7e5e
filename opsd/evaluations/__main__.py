"""Evaluates a checkpoint in the form of transformers: ``python -m opsd.evaluations RUN STEP CHECKPOINT COMMAND``.

``COMMAND`` is that of a harness. The results become a line of ``evaluations.jsonl`` in the folder ``RUN``. Then the
mark by which the checkpoint has waited for its evaluation is removed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from opsd import durable, exitcodes
from opsd.evaluations import harness
from opsd.evaluations.queue import AWAITING, RESULTS, SCORES
from opsd.words import with_remedy


def main(arguments: Sequence[str]) -> int:
    """Evaluate one checkpoint; the exit code is 1 if that has failed."""
    run, step, checkpoint, command = Path(arguments[0]), int(arguments[1]), Path(arguments[2]), arguments[3]
    line: dict[str, Any] = {"step": step, "results": {}}
    try:
        if not checkpoint.is_dir():
            raise harness.HarnessError(f"{checkpoint} is not there any more: it was removed before its evaluation")
        line["results"], line["errors"] = harness.run(
            command, checkpoint, run / SCORES / f"{checkpoint.parent.name}-{step}"
        )
    except (harness.HarnessError, OSError) as error:
        line["why"] = str(error)
        print(f"opsd: {error}", file=sys.stderr)
    try:
        durable.append(run / RESULTS, json.dumps({"t": time.time(), **line}).encode() + b"\n")
        _unmark(checkpoint)
    except OSError as error:  # the checkpoint still waits for its evaluation
        print(f"opsd: the results cannot be kept: {with_remedy(error)}", file=sys.stderr)
        return exitcodes.of_error(error)
    return exitcodes.FAILED if "why" in line else exitcodes.OK


def _unmark(checkpoint: Path) -> None:
    """Transformers removes checkpoints in the order of their times, so the folder keeps its own. Raises OSError."""
    with suppress(FileNotFoundError):
        before = checkpoint.stat()
        (checkpoint / AWAITING).unlink()
        os.utime(checkpoint, ns=(before.st_atime_ns, before.st_mtime_ns))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
