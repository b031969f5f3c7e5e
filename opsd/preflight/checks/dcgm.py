"""NVIDIA's own diagnosis, `dcgmi diag`, if DCGM is installed; its levels are mapped to the profiles."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any, Final

from opsd.preflight.base import (
    Check,
    Context,
    CouldNotRunError,
    Finding,
    Measure,
    Measurement,
    NotApplicableError,
    Outcome,
    Progress,
    Verdict,
)

_LEVELS: Final = {"quick": 1, "standard": 2, "spare": 2, "burn-in": 3}
"""Level 1 takes seconds, 2 below two minutes, 3 below half an hour."""
_SKIPPED: Final = ("skip", "skipped", "not run")


def run(context: Context, progress: Progress) -> Outcome:
    """Run the level of the profile."""
    if shutil.which("dcgmi") is None:
        raise NotApplicableError("DCGM is not installed")
    level = _LEVELS.get(context.profile, 1)
    command = ["dcgmi", "diag", "--run", str(level), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 3 * context.seconds, check=False)
    except subprocess.TimeoutExpired:
        raise CouldNotRunError(f"dcgmi diag --run {level} did not end; restart nvidia-dcgm") from None
    return parse(done.stdout or done.stderr)


def parse(text: str) -> Outcome:
    """The outcome in dcgmi's JSON (DCGM 3 and 4). Raises CouldNotRunError if it has no result."""
    try:
        answer: dict[str, Any] = json.loads(text[text.index("{") :])
    except ValueError:
        reason = text.strip().splitlines()[0] if text.strip() else "no output"
        raise CouldNotRunError(f"dcgmi gave no result: {reason}; is nvidia-dcgm running?") from None
    diagnosis = answer.get("DCGM GPU Diagnostic") or answer.get("DCGM Diagnostic") or {}
    if message := diagnosis.get("runtime_error"):
        raise CouldNotRunError(f"dcgmi could not run: {message}")
    results = [*_results(diagnosis)]
    if not results:
        raise CouldNotRunError("dcgmi's result names no test")
    findings = tuple(f for test, result in results if (f := _finding(test, result)) is not None)
    ran = sum(_status(result) not in _SKIPPED for _, result in results)
    return Outcome((Measurement("tests", ran),), findings)


def _results(diagnosis: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for category in diagnosis.get("test_categories", []):
        for test in filter(None, category.get("tests", [])):  # DCGM 3 lists nulls between its tests
            for result in test.get("results", []):
                yield str(test.get("name", "unnamed")), result


def _status(result: dict[str, Any]) -> str:
    return str(result.get("status", "unknown")).lower()


def _finding(test: str, result: dict[str, Any]) -> Finding | None:
    """The problem in one result. An unknown status is not a pass."""
    status = _status(result)
    if status == "pass" or status in _SKIPPED:
        return None
    gpu = result.get("gpu_ids", result.get("entity_id", ""))
    subject = f"GPU {gpu}" if gpu != "" else ""
    verdict = {"fail": Verdict.FAIL, "warn": Verdict.WARN}.get(status, Verdict.COULD_NOT_RUN)
    reason = _text(result.get("warnings") or result.get("info") or status)
    return Finding(verdict, f"{subject or 'the node'}: DCGM's {test} says {reason}", subject=subject)


def _text(reasons: object) -> str:
    """Warnings are a text, a list of texts, or a list of objects with a text, depending on DCGM's release."""
    if isinstance(reasons, list):
        return "; ".join(_text(reason) for reason in reasons)
    return str(reasons.get("warning", reasons) if isinstance(reasons, dict) else reasons)


CHECK = Check(
    name="dcgm",
    title="NVIDIA's diagnosis (dcgmi diag)",
    run=run,
    seconds={"quick": 20, "standard": 120, "burn-in": 1800, "spare": 120},
    measures=(Measure("tests", "", "number of DCGM tests that ran", "higher", noise=99),),
    needs=frozenset({"gpu", "exclusive"}),
    advice="follow DCGM's own advice; `dcgmi diag --run 3 --verbose` tells more",
)
