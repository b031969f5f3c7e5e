"""A user who mounts a file system that never answers over what the agent reads in shared memory.

An ordinary user does so with fusermount3(1); here root does it for the user.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.adversary.attacker import NOBODY, Attacker
from tests.adversary.attacks import invent_run
from tests.adversary.node import Node
from tests.fakes.clock import eventually
from tests.fakes.fuse import FUSE, silent_mount

pytestmark = pytest.mark.skipif(not FUSE.exists(), reason="needs FUSE")


@pytest.fixture
def good(node: Node) -> Iterator[Attacker]:
    """Another user of the node, with a run."""
    user = Attacker(0)
    user.start(invent_run, str(node.shm), "zz-good")
    yield user
    user.close()


@pytest.mark.parametrize("over", ["", "run.json", "events.jsonl", "rank-0000.page", "rank-0001.page.events.jsonl"])
def test_what_a_user_mounts_over_a_run_is_not_entered(node: Node, good: Attacker, over: str) -> None:
    """The collectors of all runs and of NCCL hung for good, for everybody."""
    bad = node.shm / "bad"
    bad.mkdir()
    os.chown(bad, NOBODY, NOBODY)
    if over:
        (bad / over).touch()
        os.chown(bad / over, NOBODY, NOBODY)
    with silent_mount(bad / over, NOBODY):
        process = node.start("agent", "--config", str(node.config))
        try:
            assert eventually(lambda: node.series("opsd_rank_up").get('rank="0",run="zz-good"') == 1.0)
            began = node.ticks()
            assert eventually(lambda: node.ticks() >= began + 4)
            assert node.series("opsd_rank_up").get('rank="0",run="zz-good"') == 1.0
            hung = [name for name, on in node.series("opsd_collector_state").items() if on and 'state="hung"' in name]
            assert hung == []
        finally:
            process.kill()
    process.communicate(timeout=60)
