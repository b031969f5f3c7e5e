"""What is made from the code is current: rules, boards, reference pages, the example configuration, the metrics."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml")
pytest.importorskip("grafana_foundation_sdk")

from tests.generate import ROOT, leftovers, outdated


def test_everything_generated_is_current() -> None:
    """`make generate` writes it; look at the difference then."""
    stale = [str(path.relative_to(ROOT)) for path in (*outdated(), *leftovers())]
    assert not stale, f"run `make generate`: {', '.join(stale)}"
