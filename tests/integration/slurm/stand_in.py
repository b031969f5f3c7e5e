"""Stands for ``opsd launch`` on one node: leaves when the test says so, and claims the end as a launcher does.

``answer-NODE`` in the current folder holds ``{"exit": code}``, with ``"end": code`` if it is to say how the run has
ended. A signal to stop is noted, and has it end the run with 75.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from opsd.checkpoints import claims
from opsd.checkpoints.claims import Claim
from opsd.launch.run.launchers import start_of_job


def main() -> int:
    """Returns what the launcher ends with."""
    node, caught = os.environ["SLURMD_NODENAME"], list[str]()

    def note(number: int, _: object) -> None:
        caught.append(signal.Signals(number).name)
        Path(f"caught-{node}").write_text(" ".join(caught))

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, note)
    names = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "CUDA_VISIBLE_DEVICES")
    job = {name: os.environ.get(name, "") for name in names}
    Path(f"job-{node}").write_text(json.dumps(job))
    with open("calls", "a") as calls:
        calls.write(f"{node} {json.dumps(sys.argv[1:])}\n")
    value = dict(zip(sys.argv, sys.argv[1:], strict=False))
    folder, start = Path(value["--run-dir"]), start_of_job(value["--run-id"], os.environ)
    if not begun(folder, start):
        claims.create(folder, Claim(claims.newest_number(folder) + 1, start, f"{node}.{os.getpid()}"))
    answer = Path(f"answer-{node}")
    while not answer.exists() and not caught:
        time.sleep(0.05)
    if caught:  # as launchers do, it waits for the others, who would be killed with the end of the run
        deadline = time.monotonic() + 25
        while len(list(Path().glob("caught-*"))) < len(list(Path().glob("job-*"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # for a second signal
    told = {"exit": 75, "end": 75} if caught else json.loads(answer.read_text())
    if "end" in told:
        plan = {"end": {"code": told["end"], "reason": "the test says so", "lost": told.get("lost", [])}}
        claims.create(folder, Claim(claims.newest_number(folder) + 1, start, f"{node}.{os.getpid()}", plan=plan))
    return int(told["exit"])


def begun(folder: Path, start: str) -> bool:
    """Whether a launcher of this start has made a claim."""
    newest = claims.newest(folder)
    return newest is not None and newest.start == start


if __name__ == "__main__":
    sys.exit(main())
