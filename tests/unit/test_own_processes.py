"""Processes that opsd starts of itself, as root too, run this opsd, and nothing of the folder it is called from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from opsd.repair import driver
from opsd.repair.machine import RemedyError, run_command
from opsd.repair.retest import Preflight
from opsd.slurm.connect import Worker
from opsd.slurm.port import SlurmError

SPY = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()"


def _ask_slurm() -> None:
    worker = Worker()
    try:
        worker("nodes")
    finally:
        worker.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda: driver.read("/no/such/library", run_command),
        lambda: Preflight(["--no-such-option"], "quick")([]),
        _ask_slurm,
    ],
    ids=["state of the driver", "retest", "pyslurm"],
)
def test_a_package_of_the_same_name_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> None:
    """A user's folder is where an administrator types sudo."""
    package = tmp_path / "opsd"
    package.mkdir()
    (package / "__init__.py").write_text(SPY)
    monkeypatch.chdir(tmp_path)
    with suppress(RemedyError, SlurmError):
        call()
    assert not (package / "ran").exists()
