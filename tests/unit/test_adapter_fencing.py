"""The look before each checkpoint of an adapter: who may write does, who was overtaken ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.adapters.shared import Gate
from opsd.checkpoints.claims import FOLDER, Claim, ClaimError, Fence, create
from opsd.client import Reporter


def test_without_a_launcher_the_gate_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was started by hand has no run that could go on without it."""
    monkeypatch.delenv("OPSD_RUN_DIR", raising=False)
    Gate(Reporter(None)).pass_through()


def test_a_rank_of_the_newest_generation_passes(tmp_path: Path) -> None:
    """Until a later one has been claimed."""
    assert create(tmp_path, Claim(1, "s", "n1 7"))
    gate = Gate(Reporter(None), Fence(tmp_path, 1))
    gate.pass_through()
    assert create(tmp_path, Claim(2, "s", "n2 8"))
    with pytest.raises(SystemExit) as end:
        gate.pass_through()
    assert end.value.code == exitcodes.FENCED


def test_a_file_server_that_comes_back_delays_and_nothing_else(tmp_path: Path) -> None:
    """It is waited for; after the limit the rank fails, so that the run starts again."""
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(ClaimError, match="whether generation 1 may write cannot be seen"):
        Gate(Reporter(None), Fence(tmp_path, 1), limit_s=0).pass_through()
    timer = threading.Timer(0.5, (tmp_path / FOLDER).unlink)
    timer.start()
    Gate(Reporter(None), Fence(tmp_path, 1)).pass_through()
    timer.join()
