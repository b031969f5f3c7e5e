"""An agent without memory acts on nothing, and one that is killed while it acts finishes what it began."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversary.attacker import Attacker
from tests.adversary.attacks import invent_run
from tests.adversary.node import NAME, Node
from tests.fakes.clock import until
from tests.fakes.tmpfs import tmpfs


def drained(node: Node) -> bool:
    return any("state=drain" in order for order in node.slurm_orders())


def swaps(node: Node) -> list[tuple[str, str]]:
    """Outcome and detail of every swap that an incident shows."""
    actions = [action for incident in node.incidents() for action in incident["actions"]]
    return [(action["outcome"], action["detail"]) for action in actions if action["verb"] == "swap_node"]


@pytest.fixture
def state(node: Node) -> Iterator[Path]:
    """The state folder, on a disk of its own."""
    with tmpfs(node.folder / "state", "size=8m") as state:
        yield state


def test_an_agent_that_starts_on_a_read_only_disk_drains_nothing(node: Node, attacker: Attacker, state: Path) -> None:
    """A GPU is broken in truth, and the incident says why nothing is done; with a disk the node is drained."""
    attacker.start(invent_run, str(node.shm), "run")
    subprocess.run(["mount", "-o", "remount,ro", state], check=True)
    node.gpus[0].set_remapped_rows(failure=True)
    with node.agent():
        (_, detail), *_ = until(lambda: swaps(node))
        assert "nothing would remember it" in detail
        assert not drained(node)
        subprocess.run(["mount", "-o", "remount,rw", state], check=True)
        until(lambda: drained(node))


def test_a_drain_that_was_begun_is_carried_out_after_a_kill(node: Node, attacker: Attacker) -> None:
    """Slurm was slow, and the agent was killed between the swap and the drain."""
    attacker.start(invent_run, str(node.shm), "run")
    held = hold_updates(node)
    with node.agent() as agent:
        node.gpus[0].set_remapped_rows(failure=True)
        until(held.exists)
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    (node.folder / "hold").unlink()
    assert not drained(node)
    with node.agent():
        until(lambda: drained(node))
        (outcome, detail), *_ = until(lambda: [swap for swap in swaps(node) if swap[0] != "running"])
        assert (outcome, f"drained {NAME}" in detail) == ("ok", True)
    assert node.actions().count(("swap_node", NAME)) == 1


def test_an_agent_runs_with_an_odd_journal(node: Node) -> None:
    """It takes nothing odd in, says so in one sentence, and still writes."""
    with node.agent():
        until(lambda: node.ticks() > 1)
    journal = node.folder / "state/journal.db"
    with contextlib.closing(sqlite3.connect(journal, isolation_level=None)) as database:
        action = "INSERT INTO actions (incident, at, kind, verb, target) VALUES ('i', ?, 'k', 'v', ?)"
        database.execute(action, ("noon", "t"))
        database.execute(action, (1e9, b"\xff"))
        database.execute("INSERT INTO incidents VALUES ('i', 'k', 'y', 'open', 1, NULL, ?)", ("[" * 100_000,))
    with node.agent() as agent:
        until(lambda: node.ticks() > 3)
        assert node.series("opsd_journal_up") == {"": 1.0}
        agent.terminate()
        log = agent.communicate()[1]
    assert log.count("records that cannot be read") == 1
    assert [*journal.parent.glob("journal.db.odd-*")]


def hold_updates(node: Node) -> Path:
    """Slurm's updates wait, unnoted, until the file ``hold`` is gone; the file returned exists once one does."""
    hold, held, scontrol = node.folder / "hold", node.folder / "held", node.folder / "bin/scontrol"
    hold.touch()
    real = node.folder / "bin/real/scontrol"
    real.parent.mkdir()
    scontrol.rename(real)
    wait = f'if [ "$1" = update ] && [ -e {hold} ]; then touch {held}; sleep 60; exit 1; fi'
    scontrol.write_text(f'#!/bin/sh\n{wait}\nexec {real} "$@"\n')
    scontrol.chmod(0o755)
    return held
