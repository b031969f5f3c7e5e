"""Preflight checks on files that a test has written in place of /proc, /sys and /dev."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from opsd.preflight.base import Context, Finding, Outcome


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write ``files`` (path to content) below ``root``."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n", encoding="utf-8")
    return root


def look(check: ModuleType, root: Path, **fields: Any) -> Outcome:
    """Run a check's function on the fixture tree ``root``."""
    context = Context("node-1", "quick", 0.1, proc=str(root), sys=str(root), dev=str(root), **fields)
    outcome: Outcome = check.run(context, lambda share, subject: None)
    return outcome


def summaries(findings: Iterable[Finding]) -> list[str]:
    """The first sentence of each."""
    return [finding.summary for finding in findings]
