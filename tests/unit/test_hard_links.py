"""Files of others that a user links into a run, which root could read (anybody may where fs.protected_hardlinks is 0).

Each is what the agent would use and tell, but for its owner and mode.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.collectors.base import Reading
from opsd.collectors.nccl import NcclCollector
from opsd.collectors.ranks import RanksCollector
from tests.fakes.run_folder import read, runs, write_run

USER = 65_534
WARNING = b"node-1:1:1 [0] NCCL WARN secret\n"
EVENT = json.dumps({"t": 1.0, "event": "resumed", "secret": 1}).encode() + b"\n"
MODES = pytest.mark.parametrize("mode, told", [(0o600, False), (0o604, True)])

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may read the other file")


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def memory(top: Path) -> Path:
    """The user's run in shared memory, whose run folder is the user's as well."""
    (top / "run/flight_recorder").mkdir(parents=True)
    (top / "run/logs/gen-0002").mkdir(parents=True)
    memory = top / "shm/r1"
    memory.mkdir(parents=True)
    (memory / "rank-0000.page").touch()
    write_run(memory, 1, launcher_start=1, folder=str(top / "run"))
    for path in top.rglob("*"):
        os.chown(path, USER, USER)
    return memory


def link(place: Path, content: bytes, mode: int) -> None:
    """``place`` is a file of root's, which has ``mode``."""
    private = place.with_name(f"of-root-{place.name}")
    private.write_bytes(content)
    private.chmod(mode)
    place.unlink(missing_ok=True)
    place.hardlink_to(private)


@MODES
@pytest.mark.parametrize("name", ["events.jsonl", "rank-0000.page.events.jsonl"])
def test_events(memory: Path, name: str, mode: int, told: bool) -> None:
    """Of the launcher and of a rank."""
    link(memory / name, EVENT, mode)
    assert [event.kind for event in read(RanksCollector(memory.parent)).events] == ["resumed"] * told


@MODES
def test_the_description_of_a_run(memory: Path, mode: int, told: bool) -> None:
    """For the collector of ranks and for that of NCCL."""
    (memory / "rank-0000.page").rename(memory / "rank-0001.page")
    link(memory / "run.json", (memory / "run.json").read_bytes(), mode)
    assert len(runs(read(RanksCollector(memory.parent)))) == told
    assert len(of_nccl(NcclCollector(memory.parent, addresses=())).samples) == (5 if told else 1)


@MODES
def test_the_log_of_a_rank(memory: Path, top: Path, mode: int, told: bool) -> None:
    """A message in it would go to everybody."""
    (memory / "rank-0000.page").rename(memory / "rank-0001.page")  # a node that does not lead asks no RAS
    collector = NcclCollector(memory.parent)
    of_nccl(collector)
    link(top / "run/logs/gen-0002/rank-0001.log", WARNING, mode)
    assert [event.data["text"] for event in of_nccl(collector).events] == ["secret"] * told


@MODES
def test_a_flight_recorder_dump(memory: Path, top: Path, mode: int, told: bool) -> None:
    """It cannot be used either way, and the agent says for which of two reasons."""
    collector = NcclCollector(memory.parent, addresses=[("127.0.0.1", 1)])
    of_nccl(collector)
    link(top / "run/flight_recorder/rank-0000.json", b"secret", mode)
    (event,) = of_nccl(collector).events
    assert ("not a flight recorder dump" if told else "not a regular file") in event.data["why"]


def of_nccl(collector: NcclCollector) -> Reading:
    reading = collector.collect()
    assert isinstance(reading, Reading)
    return reading
