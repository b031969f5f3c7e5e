"""Users who do at once all that makes the agent need memory: together it must fit into what the service has."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from opsd.ports import free_port
from tests.adversary import bombs
from tests.adversary.attacker import NOBODY, Attacker
from tests.adversary.attacks import make_files
from tests.adversary.node import Node
from tests.adversary.soak.verdict import MOST_MIB
from tests.fakes.clock import eventually

pytestmark = pytest.mark.xdist_group("agent-process")

LASTS_S = 30.0
PAGES = ("/", "/api/v1/ranks", "/metrics", "/api/v1/status", "/api/v1/incidents?limit=1000&symptoms=1", "/job/long-0")


@pytest.fixture
def users(attacker: Attacker) -> Iterator[list[Attacker]]:
    """Five user ids, as an ordinary user has thousands of them in a user namespace."""
    with ExitStack() as stack:
        others = [stack.enter_context(closing(Attacker(NOBODY - number))) for number in (1, 2, 3, 4)]
        yield [attacker, *others]


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
