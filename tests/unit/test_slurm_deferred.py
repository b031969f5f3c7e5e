"""Drains and returns that wait until Slurm answers, and the commands that request them."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue

import click
import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.commands.main import cli
from opsd.commands.node_service import NodeService, Sentences
from opsd.settings.policy import PolicySettings
from opsd.slurm import ownership
from opsd.slurm.deferred import DeferredUpdate, DeferredUpdates, SlurmDrainer, keep_applying
from opsd.slurm.ownership import DAY_S
from opsd.slurm.port import Node, SlurmDenied, SlurmError, SlurmUnavailable
from tests.fakes.slurm import FakeSlurm, cluster, held

NOW = 1_763_700_000.0
RULES = PolicySettings(max_drained_share=0.1, min_drained=1)
DOWN = SlurmUnavailable("scontrol has not answered within 12 s")


def service(slurm: FakeSlurm, folder: Path, said: list[str]) -> NodeService:
    return NodeService(slurm, RULES, DeferredUpdates(folder), said.append, NOW)


def test_a_dry_run_says_what_would_be_done(tmp_path: Path) -> None:
    """And what stands against it, with the same exit codes, and touches nothing."""
    slurm, said = cluster(held("x1"), held("x2")), list[str]()
    update = DeferredUpdate("drain", ("n01",), NOW, "opsd:manual x")
    assert service(slurm, tmp_path, said).apply(update, dry_run=True).exit_code == exitcodes.FAILED
    assert "2 may be held at once" in said[-1]
    assert service(cluster(), tmp_path, said).apply(update, dry_run=True).exit_code == exitcodes.OK
    assert said[-1] == "would drain n01 with the reason opsd:manual x"
    unknown = DeferredUpdate("return", ("nowhere",), NOW)
    assert service(slurm, tmp_path, said).apply(unknown, dry_run=False).exit_code == exitcodes.FAILED
    assert said[-1] == "Slurm has no node nowhere"
    assert slurm.updates == []


def test_an_outcome_is_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was ordered, what came of it, which nodes changed, and every sentence that people would read."""
    slurm, update = cluster(), DeferredUpdate("drain", ("n01",), NOW, "opsd:manual x")
    for dry_run, result, changed, sentence in (
        (True, "possible", [], "would drain n01 with the reason opsd:manual x"),
        (False, "done", ["n01"], "drained n01"),
        (False, "done", [], "n01: drained by opsd already"),
    ):
        say = Sentences(as_json=True)
        node_service = NodeService(slurm, RULES, DeferredUpdates(tmp_path), say, NOW)
        assert say.conclude(update, node_service.apply(update, dry_run)) == exitcodes.OK
        assert json.loads(capsys.readouterr().out) == {
            "verb": "drain", "nodes": ["n01"], "reason": "opsd:manual x",
            "result": result, "changed": changed, "order": "", "sentences": [sentence],
        }  # fmt: skip


def test_an_order_waits_for_slurm_and_is_carried_out_once(tmp_path: Path) -> None:
    """The command says so; the agent does it when Slurm answers, and not again."""
    slurm, said, updates = cluster(), list[str](), DeferredUpdates(tmp_path)
    slurm.error = DOWN
    updates.enable()
    update = DeferredUpdate("drain", ("n01",), NOW, "opsd:manual x")
    assert service(slurm, tmp_path, said).apply(update, dry_run=False).exit_code == exitcodes.FAILED
    assert ("Slurm does not answer" in said[0], "when Slurm answers again" in said[1]) == (True, True)
    assert updates.apply(slurm, RULES, NOW + 5) == []
    slurm.error = None
    assert updates.apply(slurm, RULES, NOW + 10) == ["drained n01"]
    assert updates.apply(slurm, RULES, NOW + 20) == []
    assert slurm.updates == [(("n01",), "drain", "opsd:manual x")]


def test_orders_for_many_nodes_do_not_replace_each_other(tmp_path: Path) -> None:
    """Only one for the same nodes does, however alike the lists begin."""
    updates, many = DeferredUpdates(tmp_path), tuple(f"rack-7-node-{number:03d}" for number in range(40))
    for names, told in ((many, "opsd:manual a"), (many[:-1], "opsd:manual b"), (many[::-1], "opsd:manual c")):
        updates.put(DeferredUpdate("drain", names, NOW, told))
    assert sorted(update.told for _, update in updates.pending() if update) == ["opsd:manual b", "opsd:manual c"]


def test_an_order_is_kept_only_where_an_agent_may_carry_it_out(tmp_path: Path) -> None:
    """On a login node, or where the agent may not drain, nobody would; the user is told to repeat the command."""
    slurm, said, updates = cluster(), list[str](), DeferredUpdates(tmp_path)
    slurm.error = DOWN
    update = DeferredUpdate("drain", ("n01",), NOW, "opsd:manual x")
    for _ in range(2):
        assert service(slurm, tmp_path, said).apply(update, dry_run=False).exit_code == exitcodes.FAILED
        assert said[-1] == "no agent here may carry the order out later; give it again once Slurm answers"
        assert updates.pending() == []
        updates.enable()
        updates.disable()


def test_an_order_that_cannot_be_removed_holds_up_no_other(tmp_path: Path) -> None:
    """It is said, and the next one is carried out all the same."""
    slurm, updates = cluster(), DeferredUpdates(tmp_path)
    path = updates.put(DeferredUpdate("drain", ("n02",), NOW, "opsd:manual x"))
    (path.parent / "a.json").mkdir()
    stuck, done = updates.apply(slurm, RULES, NOW)
    assert (stuck.endswith("a.json cannot be removed: Is a directory"), done) == (True, "drained n02")
    assert [path.name for path, _ in updates.pending()] == ["a.json"]


def test_the_agent_goes_on_trying(tmp_path: Path) -> None:
    """As long as Slurm is away nothing is said; the order is carried out when it is back."""
    slurm, stop, said = cluster(), threading.Event(), SimpleQueue[str]()
    slurm.error = DOWN
    DeferredUpdates(tmp_path).put(DeferredUpdate("drain", ("n01",), time.time(), "opsd:manual x"))
    parts = (DeferredUpdates(tmp_path), lambda: slurm, RULES, said.put, stop)
    agent = threading.Thread(target=keep_applying, args=parts, kwargs={"retry_s": 0.01})
    agent.start()
    try:
        with pytest.raises(Empty):
            said.get(timeout=0.1)
        slurm.error = None
        assert said.get(timeout=60) == "drained n01"
    finally:
        stop.set()
        agent.join(20)
    assert slurm.updates == [(("n01",), "drain", "opsd:manual x")]


def test_the_agent_survives_a_folder_that_fails(tmp_path: Path) -> None:
    """A disk that goes and comes back: it is said once, and what waits there is carried out then."""
    slurm, stop, said = cluster(), threading.Event(), SimpleQueue[str]()
    updates = DeferredUpdates(tmp_path)
    updates.put(DeferredUpdate("drain", ("n01",), time.time(), "opsd:manual x"))
    failing = [OSError(5, "Input/output error")] * 2

    def found() -> FakeSlurm:
        if failing:
            raise failing.pop()
        return slurm

    parts = (updates, found, RULES, said.put, stop)
    agent = threading.Thread(target=keep_applying, args=parts, kwargs={"retry_s": 0.01})
    agent.start()
    try:
        assert "cannot be read: [Errno 5] Input/output error" in said.get(timeout=60)
        assert said.get(timeout=60) == "drained n01"
    finally:
        stop.set()
        agent.join(20)


def test_an_order_that_was_overtaken_is_dropped(tmp_path: Path) -> None:
    """Someone drained the node by hand, repaired it and gave it back: the old order does not take it out again."""
    slurm, updates = cluster(), DeferredUpdates(tmp_path)
    updates.put(DeferredUpdate("drain", ("n01",), NOW, "opsd:manual x"))
    slurm.by_comment["n01"] = f"[opsd1 ib_link={NOW + 10:.0f}-{NOW + 20:.0f}]"
    (said,) = updates.apply(slurm, RULES, NOW + 30)
    assert "no longer up to date" in said
    assert (slurm.updates, updates.pending()) == ([], [])


@pytest.mark.parametrize("force", [False, True])
def test_an_order_that_comes_again_takes_no_node_out_again(tmp_path: Path, force: bool) -> None:
    """On a disk that became read-only it could not be removed; an administrator has resumed the node since."""
    slurm, updates = cluster(), DeferredUpdates(tmp_path)
    order = DeferredUpdate("drain", ("n01", "n02"), NOW + 0.2, "opsd:manual x", force)
    updates.put(order)
    updates.apply(slurm, PolicySettings(max_drained_share=0.5), NOW + 0.4)  # comments have whole seconds
    slurm.update_nodes(["n01", "n02"], "resume")
    updates.put(order)
    (said,) = updates.apply(slurm, PolicySettings(max_drained_share=0.5), NOW + 2 * 3600)
    assert ("no longer up to date" in said, slurm.by_name["n01"].usable) == (True, True)


def test_an_order_is_carried_out_while_a_node_of_it_is_left(tmp_path: Path) -> None:
    """Another has been drained for something else meanwhile."""
    slurm, updates = cluster(), DeferredUpdates(tmp_path)
    updates.put(DeferredUpdate("drain", ("n01", "n02"), NOW, "opsd:manual x"))
    slurm.update_nodes(["n01"], "drain", "opsd:ib_link-1 ib_link: down")
    slurm.by_comment["n01"] = f"[opsd1 ib_link={NOW + 10:.0f}-]"
    updates.apply(slurm, PolicySettings(max_drained_share=0.5), NOW + 30)
    assert not slurm.by_name["n02"].usable


def test_an_order_that_slurm_refuses_is_given_up(tmp_path: Path) -> None:
    """So is a file that is none, and one of the day before yesterday."""
    slurm, updates = cluster(operator=False), DeferredUpdates(tmp_path)
    updates.put(DeferredUpdate("drain", ("n01",), NOW, "opsd:manual x"))
    (said,) = updates.apply(slurm, RULES, NOW)
    assert "given up: scontrol update: Invalid user id" in said
    path = updates.put(DeferredUpdate("drain", ("n01",), NOW, "opsd:manual x"))
    path.write_text("{}")
    assert updates.apply(slurm, RULES, NOW) == [f"{path} is no order"]
    updates.put(DeferredUpdate("drain", ("n01",), NOW - 2 * DAY_S, "opsd:manual x"))
    assert "no longer up to date" in updates.apply(slurm, RULES, NOW)[0]


def test_the_agents_own_drain_waits_as_well(tmp_path: Path) -> None:
    """A node that must go is drained although slurmctld was away when that was found."""
    slurm, updates = cluster(), DeferredUpdates(tmp_path)
    slurm.error = DOWN
    drainer = SlurmDrainer(lambda: slurm, "n07", RULES, updates)
    for _ in range(2):
        with pytest.raises(SlurmError, match="n07 is drained once Slurm answers"):
            drainer("n07", "opsd:gpu_lost-1 gpu_lost: GPU 2 is lost")
    slurm.error = None
    assert updates.apply(slurm, RULES, time.time()) == ["drained n07"]
    assert slurm.by_name["n07"].reason == "opsd:gpu_lost-1 gpu_lost: GPU 2 is lost"


def test_without_slurm_both_commands_say_so(tmp_path: Path) -> None:
    """One sentence and exit code 1; a hostlist that is none, or --force without a reason, is exit code 2."""
    runner = CliRunner(env={"PATH": str(tmp_path)})
    state = f"--set=agent.state_dir={tmp_path}"
    for arguments in (["drain", "n1", "--reason=x", state], ["return", "n[1-2]", state]):
        done = runner.invoke(cli, arguments, standalone_mode=False)
        assert (done.return_value, "install Slurm's client commands" in done.output) == (exitcodes.FAILED, True)
    assert DeferredUpdates(tmp_path).pending() == []
    for arguments, why in ((["drain", "n[1-", "--reason=x"], "n[1-"), (["return", "n1", "--force"], "belong together")):
        with pytest.raises(click.UsageError, match=re.escape(why)):
            runner.invoke(cli, arguments, standalone_mode=False, catch_exceptions=False)


def test_without_permission_nothing_is_kept(tmp_path: Path) -> None:
    """Trying again would not help."""
    slurm, said = cluster(operator=False), list[str]()
    update = DeferredUpdate("drain", ("n01",), NOW, "opsd:manual x")
    assert service(slurm, tmp_path, said).apply(update, dry_run=False).exit_code == exitcodes.FAILED
    assert (said, DeferredUpdates(tmp_path).pending()) == (["scontrol update: Invalid user id"], [])
    with pytest.raises(SlurmDenied):
        ownership.drain(slurm, ["n01"], "opsd:manual x", RULES, now=NOW)


def test_a_dry_run_says_which_right_is_missing(tmp_path: Path) -> None:
    """What a rule allows may still need a right that this user has not."""
    said: list[str] = []
    slurm = FakeSlurm([Node("n1", "idle"), Node("n2", "idle")], operator=False)
    update = DeferredUpdate("drain", ("n1",), NOW, ownership.reason("maintenance", "dust"))
    assert service(slurm, tmp_path, said).apply(update, dry_run=True).exit_code == exitcodes.FAILED
    assert "but this user may not: that needs root, SlurmUser or an operator" in said[0]


@pytest.mark.parametrize(
    ("operator", "names", "stays"), [(True, ("n1",), True), (False, ("n1",), False), (True, ("n9",), False)]
)
def test_evidence_is_of_what_was_done(tmp_path: Path, operator: bool, names: tuple[str, ...], stays: bool) -> None:
    """A refused order leaves none."""
    evidence = tmp_path / "node-1.json"
    evidence.touch()
    slurm = FakeSlurm([Node("n1", "idle"), Node("n2", "idle")], operator=operator)
    update = DeferredUpdate("drain", names, NOW, ownership.reason("maintenance", "dust"))
    service(slurm, tmp_path, []).apply(update, dry_run=False, evidence=str(evidence))
    assert evidence.exists() == stays
