"""The names, types, units and labels that dashboards, alerts and runbooks are written against.

After a change that is meant, write the list anew and look at the difference::

    .venv/bin/python -m tests.unit.test_golden_metrics && git diff tests/golden
"""

from __future__ import annotations

from pathlib import Path

from opsd.commands.metrics import catalogue

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics.txt"


def interface() -> list[str]:
    """One line a metric, sorted by name."""
    return sorted(f"{m.name} {m.kind} {m.unit or '-'} {','.join(m.labels) or '-'}" for _, m in catalogue())


def test_no_metric_has_changed_unnoticed() -> None:
    """Whoever renames a metric breaks somebody's alert, and silence looks like health."""
    assert interface() == GOLDEN.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(interface()) + "\n", encoding="utf-8")
