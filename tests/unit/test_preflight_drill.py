"""`opsd preflight drill`: what is started on each node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("numpy")

from opsd.config_cli import BadConfig
from opsd.preflight.base import Context
from opsd.preflight.cli import preflight
from opsd.preflight.node_drill import Drill
from trainer.config import load


def drill(names: tuple[str, ...], spares: int, *overrides: str, ranks: int = 8) -> Drill:
    config = load("smollm3-3b", ["data.shards=/data", *overrides], environ={})
    context = Context(names[0], "drill", 0.0, train="smollm3-3b", overrides=overrides)
    return Drill(context, config, names, 0, spares, ranks, Path("/shared/drill"), Path("/dev/shm/x"), 29555)


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
