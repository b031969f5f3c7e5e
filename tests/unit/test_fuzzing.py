"""The fuzz targets: what goes wrong once is tried for ever, and the long tests try what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fakes.fuzzing import FEW, MANY, fuzz

ROOT = Path(__file__).parents[2]
TARGETS = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests/fuzz").glob("test_*.py")))


def test_what_went_wrong_once_is_tried_first() -> None:
    """Before anything that is made up; what goes wrong is not swallowed."""
    seen = list[int]()
    fuzz(seen.append, st.integers(), FEW, seeds=(1 << 99, -(1 << 99)))
    assert set(seen[:2]) == {1 << 99, -(1 << 99)} and len(seen) == FEW + 2

    def fail(number: int) -> None:
        assert number != 1 << 99

    with pytest.raises(AssertionError):
        fuzz(fail, st.just(0), FEW, seeds=[1 << 99])


def test_the_long_tests_try_ten_thousand() -> None:
    """Of each input, and `make test-long` runs them."""
    seen = list[int]()
    fuzz(seen.append, st.integers(), MANY)
    assert len(seen) == MANY == 10_000
    assert re.search(
        r"^test-long:.*\n(?:\t.*\n)*\t.*pytest.* -m long tests/fuzz$", (ROOT / "Makefile").read_text(), re.M
    )


@pytest.mark.parametrize(
    "given",
    ["any request", "any rank page", "any event", "any run json", "any record", "any answer", "any manifest",
     "any file", "any document"],
)  # fmt: skip
def test_every_input_of_others_has_a_target(given: str) -> None:
    """HTTP, rank pages, events, run.json, kernel log, RAS, manifests, configuration and journal, in both amounts."""
    name = given.replace("any", "no", 1).replace(" ", "_")
    assert re.search(rf"@AMOUNTS\ndef test_{name}_is_a_bug\(amount: int", TARGETS)
