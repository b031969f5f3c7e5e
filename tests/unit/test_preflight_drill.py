"""`opsd preflight drill`: what is started on each node."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("numpy")

from opsd.commands.preflight import preflight
from opsd.commands.settings import BadConfig
from opsd.preflight.base import Context, Interrupted, Outcome, Verdict
from opsd.preflight.drill import VICTIM, Drill, lead, take_part
from opsd.trainer.config import load
from tests.fakes.clock import eventually

LAUNCHER = """
import os, pathlib, socket, sys
folder, lines = pathlib.Path(sys.argv[1]), sys.argv[2:]
with (folder / "events.jsonl").open("a") as file:
    file.writelines(line + "\\n" for line in lines)
control = pathlib.Path(os.environ["OPSD_SHM"], "preflight-drill", "control.sock")
control.parent.mkdir()
os.chdir(control.parent)  # its whole path may be longer than that of a socket
with socket.socket(socket.AF_UNIX) as server:
    server.bind("draft")
    server.listen()
    os.rename("draft", control)
    connection, _ = server.accept()
    with connection:
        (folder / "asked").write_bytes(connection.makefile("rb").readline())
        connection.sendall(b'{"ok": true}\\n')
"""


@dataclass(frozen=True)
class FakeLauncher(Drill):
    """A drill whose launcher writes ``events`` and waits to be told to stop."""

    events: Sequence[dict[str, object]] = ()

    def command(self) -> list[str]:
        return [sys.executable, "-c", LAUNCHER, str(self.folder), *map(json.dumps, self.events)]

    def begun(self) -> bool:
        """Whether it can be told; waits for that."""
        return eventually((self.memory / "preflight-drill" / "control.sock").exists)


def drill(names: tuple[str, ...], spares: int, *overrides: str, ranks: int = 8) -> Drill:
    config = load("smollm3-3b", ["data.shards=/data", *overrides], environ={})
    context = Context(names[0], "drill", 0.0, train="smollm3-3b", overrides=overrides)
    return Drill(context, config, names, 0, spares, ranks, Path("/shared/drill"), Path("/dev/shm/x"), 29555)


def on_a_fake(tmp_path: Path, *events: dict[str, object]) -> FakeLauncher:
    this, folder, memory = drill(("n1", "n2"), 0), tmp_path / "drill", tmp_path / "memory"
    folder.mkdir()
    memory.mkdir()
    return FakeLauncher(this.context, this.config, this.names, 0, 0, 1, folder, memory, this.port, events)


def test_with_a_spare_it_has_to_take_the_place() -> None:
    """As many nodes train as before; all launchers know each other."""
    command = drill(("n1", "n2", "n3"), 1).command()
    assert {"--nnodes=2", "--spares=1", "--nodes=n[1-3]", "--node-name=n1"} <= {*command}


def test_without_a_spare_it_goes_on_with_one_node_fewer() -> None:
    """At the same global batch, which both numbers of nodes have to divide."""
    this = drill(("n1", "n2", "n3"), 0, "data.micro_batch=2")
    assert "--nnodes=2:3" in this.command()
    readers = [
        nodes * 8 // (this.config.parallel.tp * this.config.parallel.pp * this.config.parallel.cp) for nodes in (2, 3)
    ]
    assert all(this.batch() % (count * 2) == 0 for count in readers)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "a node can be lost only where two train; there are 1, and 0 spares"),
        (("--hosts", "n[1-"), "brackets do not match"),
        (("--hosts", "n[1-2]", "--spares", "1"), "there are 2, and 1 spares"),
        (("--hosts", "n[1-3]", "--node", "3"), "node number 3 is not among the 3 nodes"),
        (("--hosts", "n[1-3]", "--node", "0"), "data.shards is not set"),
        (("--hosts", "n[1-3]", "--node", "0", "--train-set", "data.shards=/data"), "with --folder"),
    ],
)
def test_a_drill_that_makes_no_sense_is_refused(options: tuple[str, ...], sentence: str) -> None:
    """One sentence, before anything is started."""
    nowhere = dict.fromkeys(("OPSD_CONFIG", *(name for name in os.environ if name.startswith("SLURM"))))
    result = CliRunner().invoke(preflight, ["drill", "--train", "tiny", *options], env=nowhere, standalone_mode=False)
    assert isinstance(result.exception, BadConfig)
    assert sentence in result.exception.message


def test_a_folder_that_somebody_else_put_there_is_refused(tmp_path: Path) -> None:
    """Its name can be guessed, and this may be root."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "drill").symlink_to("elsewhere")
    options = ["--train", "tiny", "--train-set", "data.shards=/data", "--hosts", "n[1-2]", "--node", "0"]
    command = ["drill", *options, "--folder", str(tmp_path / "drill")]
    result = CliRunner().invoke(preflight, command, env={"OPSD_CONFIG": None}, standalone_mode=False)
    assert isinstance(result.exception, BadConfig)
    assert "was made by somebody else" in result.exception.message


@pytest.mark.parametrize(("node", "name"), [("0", "metrics.jsonl"), ("0", VICTIM), ("1", VICTIM)])
def test_a_folder_of_an_earlier_drill_is_refused(tmp_path: Path, node: str, name: str) -> None:
    """Its checkpoints and events would be taken for those of this one, and its victim would kill itself again."""
    (tmp_path / name).write_text("n2")
    options = ["--train", "tiny", "--train-set", "data.shards=/data", "--hosts", "n[1-2]", "--node", node]
    command = ["drill", *options, "--folder", str(tmp_path)]
    result = CliRunner().invoke(preflight, command, env={"OPSD_CONFIG": None}, standalone_mode=False)
    assert isinstance(result.exception, BadConfig)
    assert "holds an earlier drill; remove it" in result.exception.message


def judged(this: FakeLauncher) -> Outcome:
    return lead(this, 0.0, lambda: False, lambda _what: this.begun())


def test_a_drill_without_a_checkpoint_ends_the_run_on_all_nodes(tmp_path: Path) -> None:
    """The launcher is asked: killed, it would leave the others to train on without this node."""
    this = on_a_fake(tmp_path)
    [finding] = judged(this).findings
    assert (finding.verdict, "no checkpoint was durable" in finding.summary) == (Verdict.COULD_NOT_RUN, True)
    assert json.loads((this.folder / "asked").read_bytes()) == {"cmd": "stop"}


def test_a_drill_in_which_nobody_else_trains_loses_no_node(tmp_path: Path) -> None:
    """Two nodes may train as one where there is no spare."""
    this = on_a_fake(
        tmp_path, {"event": "generation_started", "nodes": ["n1"]}, {"event": "checkpoint_committed", "step": 1}
    )
    [finding] = judged(this).findings
    assert (finding.verdict, "only n1 trained" in finding.summary) == (Verdict.COULD_NOT_RUN, True)
    assert not (this.folder / VICTIM).exists()


def test_an_interrupted_drill_ends_the_run_on_all_nodes(tmp_path: Path) -> None:
    """As one that has failed."""
    this = on_a_fake(tmp_path)
    with pytest.raises(Interrupted):
        lead(this, 60.0, this.begun, lambda _what: None)
    assert (this.folder / "asked").exists()


def test_the_other_nodes_do_not_train_on_for_ever(tmp_path: Path) -> None:
    """A first node that is gone ends nothing."""
    this = on_a_fake(tmp_path)
    take_part(this, -1000.0, lambda: not this.begun())
    assert (this.folder / "asked").exists()


def test_what_was_lost_before_is_not_the_loss_that_counts(tmp_path: Path) -> None:
    """Only what happens after a node was chosen says anything."""
    before: list[dict[str, object]] = [
        {"event": "generation_started", "nodes": ["n1", "n2"]},
        {"event": "node_lost", "t": 1.0, "silent_s": 0.1},
        {"event": "resumed", "t": 2.0, "step": 1, "lost_steps": 0},
        {"event": "checkpoint_committed"},
    ]
    this = on_a_fake(tmp_path, *before)
    (this.folder / "metrics.jsonl").write_text('{"step": 100}\n')
    [finding] = judged(this).findings
    assert (finding.verdict, "after n2 was lost" in finding.summary) == (Verdict.FAIL, True)
