"""Parsers for the output of nccl-tests and nvbandwidth."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from opsd.preflight.base import CouldNotRunError

_HALF: Final = r"\s+(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)\s+(\d+|N/A)"
"""Microseconds, algbw and busbw in GB/s, wrong elements; a row has one such half out of place and one in place."""
_ROW: Final = re.compile(rf"^\s*(\d+)\s+\d+\s+\S+\s+\S+\s+-?\d+{_HALF}{_HALF}\s*$", re.MULTILINE)


class NcclRow(NamedTuple):
    """One size of an nccl-tests run, the better of out of place and in place, in bytes and seconds."""

    size: int
    seconds: float
    algbw: float
    busbw: float
    wrong: int


def nccl_tests(text: str) -> list[NcclRow]:
    """The rows of an nccl-tests table; lines of NCCL itself between them are skipped.

    Raises CouldNotRunError if there are none or the output is incomplete.
    """
    rows = []
    for size, *halves in _ROW.findall(text):
        best = min(halves[:4], halves[4:], key=lambda half: float(half[0]))
        seconds, algbw, busbw = float(best[0]) * 1e-6, float(best[1]) * 1e9, float(best[2]) * 1e9
        wrong = sum(int(half[3]) for half in (halves[:4], halves[4:]) if half[3] != "N/A")
        rows.append(NcclRow(int(size), seconds, algbw, busbw, wrong))
    if not rows or "# Avg bus bandwidth" not in text:
        lines = [line for line in text.splitlines() if "error" in line.lower() or "failure" in line.lower()]
        raise CouldNotRunError(f"nccl-tests did not finish{': ' + lines[-1].strip() if lines else ''}")
    return rows


def nvbandwidth(text: str) -> Mapping[str, list[tuple[str, float]]]:
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
