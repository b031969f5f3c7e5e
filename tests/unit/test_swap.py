"""Planned swaps: by the agent for a node that must go, and by hand with `opsd swap`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.agent.actions import ACTION_DEADLINE_S, Executor
from opsd.agent.swap import Members, SwapError, planned_swap
from opsd.commands.swap import swap
from opsd.launch.run.run_control import answer
from opsd.runbooks.base import Action
from opsd.settings.policy import PolicySettings
from opsd.slurm.deferred import SlurmDrainer
from opsd.slurm.port import Node
from tests.fakes.launched import SwappingLauncher
from tests.fakes.leader import FakeGroup
from tests.fakes.slurm import FakeSlurm

NODES = [f"n{number:02d}" for number in range(4)]
CONTROL = "r/control.sock"
DRAINED = "opsd:gpu_lost-1 gpu_lost: GPU 2 is lost; see opsd incidents show gpu_lost-1"


def swap_out(shm: Path) -> Action:
    args = {"node": "n02", "control": str(shm / CONTROL), "incident": "gpu_lost-1", "kind": "gpu_lost"}
    return Action("swap_node", "n02", args, "GPU 2 is lost")


def executor(shm: Path, slurm: FakeSlurm | None, deadline_s: float = ACTION_DEADLINE_S) -> Executor:
    drainer = SlurmDrainer(lambda: slurm, "n02", PolicySettings()) if slurm else None
    return Executor(shm=shm, notify=lambda _text, _fields: None, drain_node=drainer, deadline_s=deadline_s)


def cluster() -> FakeSlurm:
    return FakeSlurm([Node(name, "allocated") for name in (*NODES, "s1")])


def test_the_agent_swaps_its_node_and_drains_it(tmp_path: Path) -> None:
    """The launcher is asked with the reason, the swap is waited for, the drain names incident and kind."""
    launcher, slurm = SwappingLauncher(NODES, ["s1"], control=tmp_path / CONTROL), cluster()
    ok, detail = executor(tmp_path, slurm).perform(swap_out(tmp_path))
    assert (ok, detail) == (True, "n02 is out of the run, s1 took its place; drained n02")
    assert launcher.requests == [{"cmd": "swap", "node": "n02", "reason": "GPU 2 is lost"}]
    assert launcher.nodes == ["n00", "n01", "s1", "n03"]
    assert slurm.updates == [(("n02",), "drain", DRAINED)]


def test_a_swap_that_an_earlier_agent_began_ends_with_the_drain(tmp_path: Path) -> None:
    """The launcher has carried it out while no agent ran; what was agreed is done, and said so."""
    SwappingLauncher(["n00", "n01", "s1", "n03"], [], control=tmp_path / CONTROL)
    slurm, action = cluster(), swap_out(tmp_path)
    resumed = replace(action, args={**action.args, "resumed": True})
    assert executor(tmp_path, slurm).perform(resumed) == (True, "n02 has left the run; drained n02")
    assert slurm.updates == [(("n02",), "drain", DRAINED)]


def test_without_a_spare_the_node_is_drained_all_the_same(tmp_path: Path) -> None:
    """The job goes on as long as it can, and no other one gets the node."""
    launcher, slurm = SwappingLauncher(NODES, [], control=tmp_path / CONTROL), cluster()
    ok, detail = executor(tmp_path, slurm).perform(swap_out(tmp_path))
    assert (ok, "not swapped: the run has no spare" in detail, "drained n02" in detail) == (True, True, True)
    assert [request["cmd"] for request in launcher.requests] == ["swap"]
    assert launcher.nodes == NODES
    assert slurm.updates == [(("n02",), "drain", DRAINED)]


def test_a_launcher_that_is_gone_does_not_keep_the_node_in_service(tmp_path: Path) -> None:
    """Its control socket does not answer; the drain is done."""
    ok, detail = executor(tmp_path, slurm := cluster()).perform(swap_out(tmp_path))
    assert (ok, "does not answer" in detail, len(slurm.updates)) == (True, True, 1)


def test_where_draining_is_not_allowed_only_the_swap_is_done(tmp_path: Path) -> None:
    """And if there is nothing that could be done, that is a failure."""
    SwappingLauncher(NODES, ["s1"], control=tmp_path / CONTROL)
    ok, detail = executor(tmp_path, None).perform(swap_out(tmp_path))
    assert (ok, "not drained, which policy.drain would allow" in detail) == (True, True)
    ok, detail = executor(tmp_path, None).perform(swap_out(tmp_path))
    assert (ok, detail) == (False, "n02 runs no ranks of this run; n00, n01, s1, n03 does")


def test_only_a_run_of_this_node_is_spoken_to(tmp_path: Path) -> None:
    """A path elsewhere is refused before anything is touched."""
    action = Action("swap_node", "n02", {"node": "n02", "control": "/tmp/x/control.sock"}, "x")
    ok, detail = executor(tmp_path, slurm := cluster()).perform(action)
    assert (ok, "is not the control socket of a run" in detail, slurm.updates) == (False, True, [])


def test_the_agent_does_not_take_a_long_step_for_a_refusal(tmp_path: Path) -> None:
    """Once the launcher agreed the node leaves; an action may not wait for that, and has not failed."""
    said = "n02 leaves at the next step boundary; the launcher agreed"
    SwappingLauncher(NODES, ["s1"], slowly=True, control=tmp_path / CONTROL)
    ok, detail = executor(tmp_path, slurm := cluster(), deadline_s=0.1).perform(swap_out(tmp_path))
    assert (ok, detail.startswith(said), "; drained n02" in detail, len(slurm.updates)) == (True, True, True, 1)
    ok, detail = executor(tmp_path, None, deadline_s=0.1).perform(swap_out(tmp_path))
    assert (ok, detail.startswith(said)) == (True, True)


def test_by_hand_a_swap_that_takes_too_long_is_a_failure(tmp_path: Path) -> None:
    """Clients that wait for it are told that it goes on."""
    SwappingLauncher(NODES, ["s1"], slowly=True, control=tmp_path / CONTROL)
    code, said = by_hand(tmp_path, "n02", "--timeout=0.1")
    assert (code, "n02 leaves at the next step boundary" in said) == (exitcodes.FAILED, True)
    code, said = by_hand(tmp_path, "n02", "--timeout=0.1", "--json")
    assert (code, json.loads(said)["result"]) == (exitcodes.FAILED, "under_way")


def test_a_spare_that_is_fetched_is_waited_for() -> None:
    """The launcher is asked again once it has come; if none comes, that is said."""
    launcher = SwappingLauncher(NODES, [], pool=["p7"])
    assert planned_swap(launcher, "n02", "x", patience_s=20) == ("p7",)
    assert [request["cmd"] for request in launcher.requests] == ["swap", "swap"]
    ticks = itertools.count()
    with pytest.raises(SwapError, match="one was asked for and has not come within 20 s"):
        planned_swap(
            SwappingLauncher(NODES, [], pool=[]),
            "n02",
            "x",
            patience_s=20,
            clock=lambda: float(next(ticks)),
            sleep=lambda _s: None,
        )


def test_a_launcher_of_one_node_has_no_spare() -> None:
    """It tells neither nodes nor spares; that is an answer and no error."""
    with pytest.raises(SwapError, match="the run has no spare"):
        planned_swap(lambda _request: {"ok": True, "node": "n00"}, "n00", "x", patience_s=20)


def test_a_swap_is_asked_for_again_of_the_next_head() -> None:
    """The one that was to see to it has died; or ranks have failed, and were all restarted before it came to that."""
    seen = iter([("n01", 1), ("n01", 1), ("", 1), ("n03", 1), ("n03", 1), ("n03", 2)])
    answers, asked = iter([True, False, True, True]), list[tuple[str, int]]()
    status: dict[str, object] = {"spares": ["s1"]}

    def ask(request: Mapping[str, object]) -> dict[str, object]:
        if request["cmd"] == "swap":
            asked.append((str(status["head"]), int(str(status["generation"]))))
            return {"ok": next(answers)}
        head, generation = next(seen, ("n03", 2))
        status.update(head=head, generation=generation, nodes=["n01", "s1" if len(asked) == 4 else "n02"])
        return dict(status)

    assert planned_swap(ask, "n02", "x", patience_s=20, sleep=lambda _: None) == ("s1",)
    assert asked == [("n01", 1), ("n03", 1), ("n03", 1), ("n03", 2)]


def by_hand(root: Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(swap, [*arguments, f"--set=ranks.root={root}"], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, done.output


def test_a_dry_run_names_the_spare_and_does_nothing(tmp_path: Path) -> None:
    """And what would happen to the lead; then the real thing."""
    launcher = SwappingLauncher(NODES, ["s1", "s2"], control=tmp_path / CONTROL)
    code, said = by_hand(tmp_path, "n00", "--dry-run")
    assert code == exitcodes.OK
    assert (
        "run r would checkpoint at a step boundary and go on with s1 (then s2) in the place of n00, node rank 0" in said
    )
    assert "it leads the run" in said
    assert launcher.requests == []
    code, said = by_hand(tmp_path, "n00", "--dry-run", "--json")
    assert (code, json.loads(said)["result"], json.loads(said)["spares"]) == (exitcodes.OK, "possible", ["s1", "s2"])
    code, said = by_hand(tmp_path, "n00", "--reason=new fan")
    assert (code, said) == (exitcodes.OK, "n00 is out of the run, s1 took its place\n")
    assert launcher.requests == [{"cmd": "swap", "node": "n00", "reason": "new fan"}]


def test_a_dry_run_tells_that_a_spare_would_have_to_come(tmp_path: Path) -> None:
    """A real swap asks for one if the run waits for nodes, which its launcher tells."""
    launcher = SwappingLauncher(NODES, [], control=tmp_path / CONTROL, pool=["s1"])
    code, said = by_hand(tmp_path, "n01", "--dry-run")
    assert code == exitcodes.OK
    assert said == (
        "run r would ask for a spare, which has to come within 600 s, checkpoint at a step boundary and go on with it "
        "in the place of n01, node rank 1\n"
    )
    assert launcher.requests == []
    for waits in (True, False):
        group = FakeGroup("n00")
        answered = answer({"cmd": "status"}, group, between=False, generation=1, tell=lambda _: None, waits=waits)
        assert Members.of(answered).waits == waits


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_what_cannot_be_swapped_is_said(tmp_path: Path, dry: list[str]) -> None:
    """No spare, no such node, no such run, two runs on the node: one sentence and exit code 1."""
    assert "call it on a node of the run" in by_hand(tmp_path, "n00", *dry)[1]
    SwappingLauncher(NODES, [], control=tmp_path / CONTROL)
    SwappingLauncher(["n00"], [], control=tmp_path / "q/control.sock", run="q")
    for arguments, why in (
        (["n01"], "the run has no spare"),
        (["n77"], "no run with a launcher on this node has ranks on n77; these run here: q, r"),
        (["n00"], "q, r have ranks on n00; name one with --run"),
        (["n01", "--run=x"], "run x has no launcher on this node; there is q, r"),
    ):
        code, said = by_hand(tmp_path, *arguments, *dry)
        assert (code, why in said) == (exitcodes.FAILED, True), said
