"""A user who listens where NCCL's RAS does: what it says is about that user's own runs at most."""

from __future__ import annotations

from opsd.ports import free_port
from tests.adversary.attacker import NOBODY, Attacker
from tests.adversary.attacks import false_ras, invent_run
from tests.adversary.node import Node
from tests.fakes.clock import eventually
from tests.fakes.ras import missing_rank, ras_json, ras_rank

VICTIM = NOBODY - 1


def test_a_false_ras_speaks_for_no_other_users_run(node: Node, attacker: Attacker) -> None:
    """It is not asked while the runs here are another's."""
    port = free_port()
    node.configure("[nccl]", f'ras = ["127.0.0.1:{port}"]', "interval_s = 1.0")
    victim = Attacker(VICTIM)
    try:
        victim.start(invent_run, str(node.shm), "train")
        requests = attacker.start(false_ras, port, ras_json([ras_rank(0, {})], [missing_rank(1)]))
        with node.agent():
            assert eventually(lambda: node.series("opsd_nccl_ras_up") == {"": 0.0})
            assert eventually(lambda: node.ticks() > 4)
            assert node.series("opsd_nccl_problems") == {}
    finally:
        victim.close()
    requests.kill()
    assert requests.stdout is not None
    assert "CLIENT PROTOCOL" not in requests.stdout.read()
