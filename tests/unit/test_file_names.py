"""Names of test files: pytest imports each as a module of its own, and leaves out a second one of the same name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_test_files_have_the_same_name() -> None:
    """In whichever folders they are."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []
