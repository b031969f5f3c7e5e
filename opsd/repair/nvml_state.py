"""What NVML says of the GPUs, read by a process of its own: a driver that hangs holds up nobody, and no GPU stays open.

A GPU that any process has open cannot be reset, the one that repairs included.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from opsd.collectors.base import NoData
from opsd.collectors.lib.nvml.series import RECOVERY_ACTION
from opsd.collectors.nvml import NvmlCollector
from opsd.repair.machine import RemedyError, Run

DEADLINE_S = 60.0


def read(library: str | None, run: Run) -> Mapping[str, Any]:
    """``{"facts": [...], "samples": [[name, labels, value], ...]}``. Raises RemedyError."""
    said = run([sys.executable, "-P", "-m", __name__, library or ""], DEADLINE_S).splitlines()
    try:
        state: Mapping[str, Any] = json.loads(said[-1])
    except (IndexError, ValueError) as error:
        raise RemedyError("the driver's state could not be read") from error
    if "missing" in state:
        raise RemedyError(str(state["missing"]))
    return state


def recovery_actions(library: str | None, run: Run) -> list[int]:
    """What the driver asks for, for each GPU that answers; empty if the driver does not answer."""
    try:
        samples = read(library, run)["samples"]
    except RemedyError:
        return []
    return [int(value) for name, _labels, value in samples if name == RECOVERY_ACTION.name]


def main() -> None:
    """Print the state on one line; the argument is the library of NVML, "" for the driver's own."""
    try:
        reading = NvmlCollector(sys.argv[1] or None).collect()
    except Exception as error:  # a broken driver may raise anything
        print(json.dumps({"missing": f"{type(error).__name__}: {error}"}))
        return
    if isinstance(reading, NoData):
        print(json.dumps({"missing": reading.reason}))
        return
    samples = [[s.metric.name, dict(zip(s.metric.labels, s.labels, strict=True)), s.value] for s in reading.samples]
    print(json.dumps({"facts": [asdict(fact) for fact in reading.facts], "samples": samples}, default=str))


if __name__ == "__main__":
    main()
