"""Alerts and incidents agree: a real Prometheus with the shipped rules scrapes what the agent exports in scenarios."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("yaml")

from opsd.scenarios.model import files, load
from tests.fakes.alert_cases import Replay, tell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("stack"),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="the Debian package prometheus is not installed"),
]

FOLDER = Path(__file__).parent
FILES = [*files(FOLDER)]
FAULTS = [*{path.parent.name: path for path in reversed(FILES) if load(path).expect}.values()]
"""One for each kind."""
AT_ONCE = 50
"""A hundred agents were more than two busy cores scraped in time."""
SAMPLE = [*FAULTS[::4], *[path for path in FILES if not load(path).expect][::50]]


def disagreements(folder: Path, paths: Sequence[Path]) -> list[str]:
    told = [tell(f"{path.parent.name}/{path.stem}", load(path)) for path in paths]
    with Replay(folder, told).running() as replay:
        return replay.disagreements()


def test_alerts_and_incidents_agree_in_a_sample_of_them(tmp_path: Path) -> None:
    """Kind, severity, GPU and mount are equal at every stage, and what is over ends its alert."""
    assert disagreements(tmp_path, SAMPLE) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(0, len(FILES), AT_ONCE))
def test_alerts_and_incidents_agree_in_every_scenario(tmp_path: Path, number: int) -> None:
    """The same for all of them, some at a time."""
    assert disagreements(tmp_path, FILES[number : number + AT_ONCE]) == []
