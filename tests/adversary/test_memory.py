"""An agent without memory or disk acts on nothing, and finishes what it began."""

from __future__ import annotations

import contextlib
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from opsd.ports import free_port
from tests.adversary import bombs
from tests.adversary.attacker import NOBODY, Attacker
from tests.adversary.attacks import invent_run, make_files
from tests.adversary.node import NAME, Node
from tests.adversary.soak.verdict import MOST_MIB
from tests.fakes.clock import eventually, until
from tests.fakes.tree import tmpfs

# An agent without memory acts on nothing, and one that is killed while it acts finishes what it began.


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


# Users fill the memory file system, and logs the disk, while the agent runs: it goes on, and says what it lacks.


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


# Users who do at once all that makes the agent need memory: together it must fit into what the service has.


LASTS_S = 30.0

PAGES = ("/", "/api/v1/ranks", "/metrics", "/api/v1/status", "/api/v1/incidents?limit=1000&symptoms=1", "/job/long-0")


@pytest.fixture
def users(attacker: Attacker) -> Iterator[list[Attacker]]:
    """Five user ids, as an ordinary user has thousands of them in a user namespace."""
    with ExitStack() as stack:
        others = [stack.enter_context(closing(Attacker(NOBODY - number))) for number in (1, 2, 3, 4)]
        yield [attacker, *others]


@pytest.mark.xdist_group("agent-process")
@pytest.mark.timeout(300)
def test_all_attacks_together_leave_the_agent_its_memory(node: Node, users: list[Attacker]) -> None:
    """Each alone was bounded by an estimate; one emoji in an answer of RAS, or one list named often, was not in it."""
    ras, runs = free_port(), node.folder / "runs"
    runs.mkdir()
    runs.chmod(0o1777)
    node.configure("[nccl]", f'ras = ["127.0.0.1:{ras}"]', "interval_s = 1.0")
    with node.agent() as process:
        shm = str(node.shm)
        users[0].start(make_files, shm, 20_000)
        for number, user in enumerate(users[:4]):
            user.start(bombs.full_runs, shm, f"full{number}", 11, 256)
            user.start(bombs.dump_bombs, shm, str(runs), f"dumps{number}", 0.2)
            user.start(bombs.ask_for_all, node.port, [*PAGES, f"/job/long-{number}"], 60)
        users[4].start(bombs.ras_bombs, shm, "ras", ras)
        users[2].start(bombs.long_ledgers, shm, str(runs), "long", 4)
        began = time.monotonic()
        assert eventually(lambda: process.poll() is not None or time.monotonic() > began + LASTS_S, LASTS_S + 30)
        assert process.poll() is None
        assert highest_mib(process.pid) < MOST_MIB
        assert [attack for user in users for attack in user.ended] == []
        assert eventually(lambda: node.get("/metrics"))


def highest_mib(pid: int) -> float:
    """The most memory that the process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    assert found
    return int(found[1]) / 1024
