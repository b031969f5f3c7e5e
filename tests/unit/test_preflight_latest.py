"""Which preflight proves a node good."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.preflight.history import History, newest
from opsd.preflight.report import Report
from opsd.settings.sections import PreflightSettings
from opsd.slurm.ownership import PreflightResult
from tests.fakes.preflight_checks import good, make
from tests.fakes.preflight_reports import ABSENT, GEMM, VERSIONS, report

CHECKS = (make("versions", good), make("infiniband", good))
WHOLE = (VERSIONS, ABSENT)


@pytest.mark.parametrize(
    ("reports", "proof"),
    [
        ([report(*WHOLE)], PreflightResult(1000.0, True)),
        ([report(*WHOLE), report(GEMM, started=2000.0)], PreflightResult(2000.0, False)),
        ([report(VERSIONS)], None),
        ([report(*WHOLE), report(VERSIONS, started=2000.0)], PreflightResult(1000.0, True)),
        ([report(*WHOLE, interrupted=True)], None),
        ([report(*WHOLE, node="another")], None),
    ],
    ids=["whole", "failed later", "with --only", "whole, then with --only", "interrupted", "another node's"],
)
def test_only_a_whole_preflight_proves_anything(
    tmp_path: Path, reports: list[Report], proof: PreflightResult | None
) -> None:
    """The newest counts; of those cut short only a failure does. A report given by hand counts like the history."""
    history = History(tmp_path / "preflight.sqlite")
    settings = PreflightSettings()
    assert newest("node-1", "quick", CHECKS, settings, history, reports) == proof
    for one in reports:
        if not one.interrupted:
            history.record(one)
    assert newest("node-1", "quick", CHECKS, settings, history) == proof


def test_a_preflight_that_is_still_to_come_proves_nothing(tmp_path: Path) -> None:
    """It was made while the clock was wrong, and would be the newest until then."""
    reports = [report(*WHOLE), report(*WHOLE, started=9_000.0)]
    history = History(tmp_path / "preflight.sqlite")
    for now, at in ((5_000.0, 1_000.0), (9_000.0, 9_000.0)):
        assert newest("node-1", "quick", CHECKS, PreflightSettings(), history, reports, now) == PreflightResult(
            at, True
        )


def test_what_the_settings_skip_is_not_required(tmp_path: Path) -> None:
    """The node's own configuration says what belongs to its profile."""
    settings = PreflightSettings(skip=("infiniband",))
    history = History(tmp_path / "preflight.sqlite")
    assert newest("node-1", "quick", CHECKS, settings, history, [report(VERSIONS)]) == PreflightResult(1000.0, True)
