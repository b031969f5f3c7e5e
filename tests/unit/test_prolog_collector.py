"""The word of the last prolog as series."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectors.prolog import PrologCollector
from opsd.collectors.base import NoData, Reading


def series(path: Path) -> dict[tuple[str, ...], float]:
    reading = PrologCollector(path, wall=lambda: 1000.0).collect()
    assert isinstance(reading, Reading)
    return {(sample.metric.name, *sample.labels): sample.value for sample in reading.samples}


@pytest.mark.parametrize("word", ["fit", "unfit", "unknown"])
def test_the_word_is_a_series_and_so_is_its_age(tmp_path: Path, word: str) -> None:
    """As prolog.sh writes them."""
    (tmp_path / "word").write_text(f"{word} 900\n")
    verdicts = {("opsd_prolog_verdict", known): float(known == word) for known in ("fit", "unfit", "unknown")}
    assert series(tmp_path / "word") == verdicts | {("opsd_prolog_age_seconds",): 100.0}


@pytest.mark.parametrize(
    "content", [b"", b"fit", b"fit yesterday", b"fine 900", b"\xff\0", b"fit 900 900", b"x" * 9999]
)
def test_anything_else_is_unknown(tmp_path: Path, content: bytes) -> None:
    """And has no age."""
    (tmp_path / "word").write_bytes(content)
    found = series(tmp_path / "word")
    assert found[("opsd_prolog_verdict", "unknown")] == 1.0
    assert len(found) == 3


def test_a_node_without_a_prolog_has_no_data(tmp_path: Path) -> None:
    """Which is no error."""
    assert isinstance(PrologCollector(tmp_path / "word").collect(), NoData)
