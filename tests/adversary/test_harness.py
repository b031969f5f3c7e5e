"""The attackers' harness itself: an attack that fails for a reason of its own would pass for one that was repelled."""

from __future__ import annotations

from pathlib import Path

from tests.adversary.attacker import NOBODY, Attacker
from tests.adversary.attacks import invent_run
from tests.adversary.node import NAME, Node
from tests.fakes.clock import eventually


def test_an_attacker_is_another_user(attacker: Attacker, open_folder: Path) -> None:
    """In all its ids, and it reaches the folder without being able to write there."""

    def who(folder: str) -> None:
        import os

        assert os.access(folder, os.R_OK | os.X_OK) and not os.access(folder, os.W_OK)
        print(os.getresuid(), os.getresgid(), os.getgroups())

    ids = (NOBODY, NOBODY, NOBODY)
    assert attacker.run(who, str(open_folder)) == f"{ids} {ids} []\n"


def test_a_faulty_gpu_of_the_driver_drains_the_node(node: Node, attacker: Attacker) -> None:
    """What attackers try to bring about does happen for a true reason: the driver's word about a user's GPU."""
    attacker.start(invent_run, str(node.shm), "run")
    with node.agent():
        node.gpus[0].set_remapped_rows(failure=True)
        assert eventually(lambda: ("swap_node", NAME) in node.actions())
        assert eventually(lambda: any("state=drain" in order for order in node.slurm_orders()))
