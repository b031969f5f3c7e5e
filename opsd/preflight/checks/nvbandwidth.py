"""NVIDIA's nvbandwidth, if it is installed: copy-engine copies between host and GPUs and between GPUs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any, Final

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


def parse(text: str) -> Mapping[str, list[tuple[str, float]]]:
    """Bytes per second by test and pair ("0 to 1"), from `nvbandwidth --json`.

    Raises CouldNotRunError if it reports an error or nothing.
    """
    try:
        body: dict[str, Any] = json.loads(text[text.index("{") :])["nvbandwidth"]
    except (ValueError, KeyError) as error:
        raise CouldNotRunError(f"nvbandwidth gave no result: {text.strip()[:120] or 'no output'}") from error
    if body.get("error"):
        raise CouldNotRunError(f"nvbandwidth could not run: {body['error']}")
    found = {
        str(case.get("name")): [*_cells(case.get("bandwidth_matrix", []))]
        for case in body.get("testcases", [])
        if case.get("status") == "Passed" and "GB/s" in str(case.get("bandwidth_description", "GB/s"))
    }
    failed = [str(case.get("name")) for case in body.get("testcases", []) if case.get("status") in ("Error", "Failed")]
    if failed or not any(found.values()):
        raise CouldNotRunError(f"nvbandwidth could not measure {', '.join(failed) or 'anything'}")
    return found


def _cells(matrix: list[list[Any]]) -> Iterator[tuple[str, float]]:
    """The measured cells of a matrix of texts, "N/A" where nothing was measured."""
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            if value != "N/A":
                yield f"{row} to {column}", float(value) * 1e9


def run(context: Context, progress: Progress) -> Outcome:
    """Run the three tests."""
    if shutil.which("nvbandwidth") is None:
        raise NotApplicableError("nvbandwidth is not installed")
    command = ["nvbandwidth", "--json", "--testcase", *_TESTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 3 * context.seconds, check=False)
    except subprocess.TimeoutExpired:
        raise CouldNotRunError("nvbandwidth did not end; look for Xids in the kernel log") from None
    return outcome(parse(done.stdout or done.stderr))


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
