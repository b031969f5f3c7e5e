"""The list of agents that Prometheus reads, made from Slurm's nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd.commands.main import cli
from opsd.commands.targets import discover, replace
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import Node, SlurmError, SlurmUnavailable
from tests.fakes.slurm import RELEASES, SEPARATOR, FakeSlurm, RecordedRunner

NODES = (Node("node-2", "idle"), Node("node-1", "down"), Node("node-9", "future"))


def test_every_node_is_a_target_and_one_that_is_down_too() -> None:
    """That a node does not answer is what Prometheus is to find out; the label says which cluster."""
    slurm = FakeSlurm(NODES, config={"ClusterName": "alpha"})
    text = discover(slurm, cluster=None, port=9477, domain="")
    assert json.loads(text) == [{"targets": ["node-1:9477", "node-2:9477"], "labels": {"cluster": "alpha"}}]
    named = discover(slurm, cluster="beta", port=1, domain="example.com")
    assert json.loads(named) == [
        {"targets": ["node-1.example.com:1", "node-2.example.com:1"], "labels": {"cluster": "beta"}}
    ]


@pytest.mark.parametrize("version", RELEASES)
def test_it_reads_what_each_release_of_slurm_answers(version: str) -> None:
    """From recorded answers of Slurm's own commands."""
    slurm = CommandSlurm(RecordedRunner(version), separator=lambda: SEPARATOR)
    (group,) = json.loads(discover(slurm, cluster=None, port=9477, domain=""))
    assert group["labels"] == {"cluster": "test"}
    assert group["targets"]


@pytest.mark.parametrize("nodes", [(), NODES[2:]])
def test_no_nodes_at_all_is_an_error_and_not_an_empty_list(nodes) -> None:
    """An empty file would silence every alert."""
    with pytest.raises(SlurmError, match="lists no node"):
        discover(FakeSlurm(nodes), cluster="x", port=9477, domain="")


def test_a_slurm_that_is_down_raises() -> None:
    """The caller keeps what it has."""
    slurm = FakeSlurm(NODES)
    slurm.error = SlurmUnavailable("slurmctld does not answer")
    with pytest.raises(SlurmUnavailable):
        discover(slurm, cluster=None, port=9477, domain="")


def test_the_file_is_replaced_at_once_and_only_if_it_changes(tmp_path: Path) -> None:
    """Prometheus reads it at any time, and reloads when it changes."""
    file = tmp_path / "targets.json"
    assert replace(file, "[]")
    first = file.stat().st_ino
    assert not replace(file, "[]")
    assert file.stat().st_ino == first
    assert replace(file, "[1]")
    assert [path.name for path in tmp_path.iterdir()] == ["targets.json"]
    assert file.stat().st_mode & 0o777 == 0o644


def test_without_slurm_the_command_says_so_and_keeps_the_file(tmp_path: Path) -> None:
    """One sentence and exit code 1."""
    file = tmp_path / "targets.json"
    file.write_text("old")
    environment = {"PATH": str(tmp_path), "SLURM_CONF": str(tmp_path / "none")}
    done = CliRunner().invoke(cli, ["targets", "--out", str(file)], env=environment)
    assert done.exit_code == 1
    assert done.output.startswith("opsd: ")
    assert f"{file} is left as it is" in done.output
    assert file.read_text() == "old"
