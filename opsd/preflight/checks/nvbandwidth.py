"""NVIDIA's nvbandwidth, if it is installed: copy-engine copies between host and GPUs and between GPUs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

from opsd.preflight import tools
from opsd.preflight.base import (
    Check,
    Context,
    CouldNotRunError,
    Measure,
    Measurement,
    NotApplicableError,
    Outcome,
    Peers,
    Progress,
)

_TESTS: Final = {
    "host_to_device_memcpy_ce": "to_device",
    "device_to_host_memcpy_ce": "from_device",
    "device_to_device_memcpy_read_ce": "between",
}


def run(context: Context, progress: Progress) -> Outcome:
    """Run the three tests."""
    if shutil.which("nvbandwidth") is None:
        raise NotApplicableError("nvbandwidth is not installed")
    command = ["nvbandwidth", "--json", "--testcase", *_TESTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 3 * context.seconds, check=False)
    except subprocess.TimeoutExpired:
        raise CouldNotRunError("nvbandwidth did not end; look for Xids in the kernel log") from None
    return outcome(tools.nvbandwidth(done.stdout or done.stderr))


def outcome(found: Mapping[str, list[tuple[str, float]]]) -> Outcome:
    """One measurement per GPU or pair of GPUs."""
    known = {measure: found[test] for test, measure in _TESTS.items() if test in found}
    return Outcome(tuple(Measurement(m, rate, pair) for m, cells in known.items() for pair, rate in cells))


def _measure(name: str, text: str) -> Measure:
    return Measure(name, "bytes_per_second", text, "higher", peers=Peers(0.10, 0.25), required=False)


CHECK = Check(
    name="nvbandwidth",
    title="NVIDIA's nvbandwidth",
    run=run,
    seconds={"standard": 60, "spare": 60},
    measures=(
        _measure("to_device", "copies to the GPU"),
        _measure("from_device", "copies from the GPU"),
        _measure("between", "copies between GPUs"),
    ),
    needs=frozenset({"gpu", "exclusive"}),
    advice="compare PCIe generation and width under load, and NVLink's state, with a healthy node",
    runbook="pcie_degraded",
)
