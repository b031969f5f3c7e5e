"""The agent's planned swap and `opsd swap` with real launchers on several nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from opsd import exitcodes
from opsd.agent.actions import Executor
from opsd.agent.swap import planned_swap
from opsd.commands.swap import swap
from opsd.runbooks.base import Action
from opsd.settings.policy import PolicySettings
from opsd.slurm.deferred import SlurmDrainer
from opsd.slurm.port import Node
from tests.fakes.launched import TRAIN
from tests.fakes.nodes import Nodes
from tests.fakes.slurm import FakeSlurm

ENDLESS = TRAIN + "\ntrain(100000, step_s=0.02)\n"


def ready(nodes: Nodes) -> bool:
    """True once n1 and n2 run ranks, and n1's launcher knows that n3 stands by."""
    running = all(nodes.state(name)["state"] == "running" for name in ("n1", "n2"))
    return running and nodes.state("n3")["state"] == "spare" and nodes.ask("n1", cmd="status")["spares"] == ["n3"]


def test_a_node_that_must_go_is_swapped_and_drained(tmp_path: Path) -> None:
    """The plan names the spare; the agent of n1 has it take over, and drains n1; no rank has died of it."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", "--spares=1", count=3) as nodes:
        nodes.until(lambda: ready(nodes))
        shm = tmp_path / "n1"
        planned = CliRunner().invoke(swap, ["n1", "--dry-run", f"--set=ranks.root={shm}"], standalone_mode=False)
        assert (planned.return_value, "go on with n3 in the place of n1" in planned.output) == (exitcodes.OK, True)
        slurm = FakeSlurm([Node(name, "allocated") for name in nodes.names])
        drainer = SlurmDrainer(lambda: slurm, "n1", PolicySettings())
        executor = Executor(shm=shm, notify=lambda _text, _fields: None, drain_node=drainer)
        args = {"node": "n1", "control": str(shm / "r/control.sock"), "incident": "gpu_lost-1", "kind": "gpu_lost"}
        done = executor.perform(Action("swap_node", "n1", args, "GPU 2 is lost"))
        assert done == (True, "n1 is out of the run, n3 took its place; drained n1")
        nodes.until(lambda: nodes.state("n3")["state"] == "running")
        assert not nodes.events("rank_exited")
    assert slurm.by_name["n1"].reason.startswith("opsd:gpu_lost-1 gpu_lost: GPU 2 is lost")


def test_a_swap_is_done_though_the_leader_dies_of_which_it_was_asked(tmp_path: Path) -> None:
    """In the very moment in which it has agreed; one spare takes its place, the other that of the node in question."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", "--spares=2", count=4) as nodes:
        nodes.until(lambda: all(nodes.state(name)["state"] in ("running", "spare") for name in nodes.names))
        nodes.until(lambda: len(nodes.ask("n2", cmd="status")["spares"]) == 2)
        first = nodes.ask("n2", cmd="status")
        leader = first["head"]
        node, other = next(name for name in first["nodes"] if name != leader), next(iter(first["spares"]))

        def ask(request: Mapping[str, object]) -> Mapping[str, Any]:
            answer = nodes.ask(other, **{key: str(value) for key, value in request.items()})
            if request["cmd"] == "swap" and nodes.processes[leader].poll() is None:
                assert answer == {"ok": True}
                nodes.kill(leader)
            return answer

        assert planned_swap(ask, node, "ecc", patience_s=40)
        nodes.until(lambda: set(nodes.ask(other, cmd="status")["nodes"]) == set(first["spares"]))
