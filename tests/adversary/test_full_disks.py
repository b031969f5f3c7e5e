"""Users fill the memory file system, and logs the disk, while the agent runs: it goes on, and says what it lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversary.attacker import Attacker
from tests.adversary.attacks import invent_run
from tests.adversary.node import Node
from tests.adversary.test_memory import drained, swaps
from tests.fakes.clock import until
from tests.fakes.tmpfs import tmpfs


@pytest.fixture
def disks(node: Node) -> Iterator[tuple[Path, Path]]:
    """State folder and folder of the runs, on small disks of their own."""
    with tmpfs(node.folder / "state", "size=2m") as state, tmpfs(node.shm, "size=1m,mode=1777") as shm:
        yield state, shm


def fill(folder: Path) -> Path:
    """A file that leaves no room beside it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))
    return filler


def test_an_agent_on_full_disks_acts_once_there_is_room(
    node: Node, attacker: Attacker, disks: tuple[Path, Path]
) -> None:
    """It ticks on, does nothing without memory, and says so in metric, status and log; afterwards all is as before."""
    attacker.start(invent_run, str(node.shm), "run")
    with node.agent() as agent:
        until(lambda: node.series("opsd_journal_up") == {"": 1.0} and node.series("opsd_rank_up"))
        fillers = [fill(disk) for disk in disks]
        node.gpus[0].set_remapped_rows(failure=True)
        until(lambda: node.series("opsd_journal_up") == {"": 0.0})
        reasons = [detail for _, detail in until(lambda: [swap for swap in swaps(node) if swap[0] != "running"])]
        assert all("journal" in reason for reason in reasons), reasons
        assert "is full" in node.status()["journal"]["problem"]
        waiting, before = node.series("opsd_journal_backlog_records")[""], node.ticks()
        assert waiting > 0 and not drained(node)
        until(lambda: node.ticks() > before + 5)
        for filler in fillers:
            filler.unlink()
        until(lambda: drained(node))
        until(lambda: node.series("opsd_journal_backlog_records") == {"": 0.0})
        assert node.series("opsd_journal_up") == {"": 1.0}
        assert node.series("opsd_journal_lost_records_total") == {"": 0.0}
        agent.terminate()
        log = agent.communicate()[1]
    assert log.count("journal is not written") == 1 and "Traceback" not in log
    assert node.actions().count(("swap_node", "node1")) >= 1
    assert not [*disks[0].glob("journal.db.*-*")], "no journal was set aside"
