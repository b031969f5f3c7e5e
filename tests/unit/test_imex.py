"""The state of the IMEX daemon, as ``nvidia-imex-ctl -q`` prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.collectors.base import NoData, Reading
from opsd.collectors.imex import ImexCollector, parse_state


def control(folder: Path, script: str) -> Path:
    path = folder / "nvidia-imex-ctl"
    path.write_text(f'#!/bin/sh\n[ "$*" = -q ] || exit 9\n{script}\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("word", "number"), [("INITIALIZING", 0), ("WAITING_FOR_PEERS", 2), ("READY", 5)])
def test_the_state_has_the_number_of_dcgm(tmp_path: Path, word: str, number: int) -> None:
    """So that both can stand in one graph."""
    reading = ImexCollector(control(tmp_path, f"echo {word}")).collect()
    assert isinstance(reading, Reading)
    assert [(sample.metric.name, sample.value) for sample in reading.samples] == [("opsd_imex_state", number)]


def test_what_is_not_known_is_not_told(tmp_path: Path) -> None:
    """Without the tool, and where its command service is off; another word is an error."""
    assert isinstance(ImexCollector(tmp_path / "none").collect(), NoData)
    silent = ImexCollector(control(tmp_path, "echo 'connection refused' >&2; exit 1")).collect()
    assert isinstance(silent, NoData)
    assert "connection refused" in silent.reason
    with pytest.raises(ValueError, match="'DREAMING', which is no state"):
        parse_state("DREAMING\n")
