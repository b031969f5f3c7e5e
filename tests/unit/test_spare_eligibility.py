"""Whether a launcher may use its node as a spare, by the agent's state folder or the node's comment in Slurm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.config import Settings
from opsd.launch.run.readiness import given_back_at, spare_readiness
from opsd.settings.sections import AgentSettings, SpareSettings
from opsd.slurm import node_comment
from opsd.slurm.node_comment import NodeHistory, Stay
from opsd.slurm.port import Node, SlurmUnavailable
from opsd.spares import pool
from opsd.spares.pool import EligibilityUnknownError, SpareState, why_not
from tests.fakes.slurm import FakeSlurm

NOW = 1_763_700_000.0
READY = SpareState(ready=True, expires_at=NOW + 60)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A node that is to have the shards of /fsx."""
    agent = AgentSettings(node="n1", state_dir=tmp_path / "state")
    return Settings(agent=agent, spare=SpareSettings(source="/fsx/shards", folder="/scratch/shards"))


@pytest.fixture
def slurm() -> FakeSlurm:
    """Slurm with this node, in the job of the launcher."""
    return FakeSlurm([Node("n1", "allocated")])


@pytest.fixture
def ordinary_user(settings: Settings) -> Iterator[None]:
    """Somebody who may not read the agent's state folder."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    pool.write(settings.agent.state_dir, READY)
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (READY, ""),
        (replace(READY, expires_at=NOW - 1), "its last verification is too old"),
        (replace(READY, ready=False, lacks={"data": "x was damaged"}), "data: x was damaged"),
        (None, "it was never verified"),
    ],
)
def test_the_state_folder_says_it(settings: Settings, slurm: FakeSlurm, found: SpareState | None, why: str) -> None:
    """Only a verdict that is good and still holds lets the node be used; Slurm is not asked."""
    slurm.error = SlurmUnavailable("the controller is away")
    if found is not None:
        pool.write(settings.agent.state_dir, found)
    assert why_not(settings, lambda: slurm, lambda: NOW).startswith(why)
    assert bool(why) == bool(why_not(settings, lambda: slurm, lambda: NOW))


def test_without_settings_nothing_is_asked(settings: Settings, slurm: FakeSlurm) -> None:
    """A site that stages nothing and pins no version, or has switched spares off, uses any node."""
    for spare in (SpareSettings(), settings.spare.model_copy(update={"enabled": False})):
        assert why_not(settings.model_copy(update={"spare": spare}), lambda: slurm, lambda: NOW) == ""
    assert why_not(settings.model_copy(update={"spare": SpareSettings(software={"torch": "2.9"})}), lambda: slurm)


@pytest.mark.usefixtures("ordinary_user")
def test_slurm_says_it_to_an_ordinary_user(settings: Settings, slurm: FakeSlurm) -> None:
    """By the node's comment, which everybody may read; what cannot be known is no answer."""
    assert "it has not said that it is ready" in why_not(settings, lambda: slurm, lambda: NOW)
    slurm.by_comment["n1"] = node_comment.write("", node_comment.NodeHistory(spare="ready", spare_at=NOW - 60))
    assert why_not(settings, lambda: slurm, lambda: NOW) == ""
    assert "which is too long ago" in why_not(settings, lambda: slurm, lambda: NOW + 2 * 86_400)
    slurm.by_comment["n1"] = node_comment.write("", node_comment.NodeHistory(spare="data,software", spare_at=NOW - 60))
    assert "it lacks data, software since" in why_not(settings, lambda: slurm, lambda: NOW)
    slurm.error = SlurmUnavailable("the controller is away")
    with pytest.raises(EligibilityUnknownError, match="cannot be known"):
        why_not(settings, lambda: slurm, lambda: NOW)
    assert "Slurm has no node n1" in why_not(settings, lambda: FakeSlurm([]), lambda: NOW)


def test_the_launcher_reads_the_settings_of_its_node(tmp_path: Path) -> None:
    """A file that cannot be used is a reason; without one nothing is asked."""
    file = tmp_path / "opsd.toml"
    assert spare_readiness({"OPSD_CONFIG": str(file)}).startswith(str(file))
    file.write_text(f'[agent]\nstate_dir = "{tmp_path}/state"\n[spare]\nsource = "/fsx"\nfolder = "/scratch"\n')
    assert spare_readiness({"OPSD_CONFIG": str(file)}).startswith("it was never verified")
    file.write_text("")
    assert spare_readiness({"OPSD_CONFIG": str(file)}) == ""


@pytest.mark.parametrize(
    ("history", "at"),
    [
        (NodeHistory(), None),
        (
            NodeHistory((Stay("gpu_lost", NOW - 900, NOW - 300), Stay("gpu_xid", NOW - 200, NOW - 100))),
            NOW - 100,
        ),
        (NodeHistory((Stay("gpu_lost", NOW - 900.0, NOW - 300.0), Stay("gpu_xid", NOW - 200.0))), None),
    ],
)
def test_slurm_knows_when_the_node_was_given_back(slurm: FakeSlurm, history: NodeHistory, at: float | None) -> None:
    """From what opsd keeps in its comment; a node that is drained is not back."""
    slurm.set_comment("n1", node_comment.write("rack 12", history))
    assert given_back_at({"SLURMD_NODENAME": "n1"}, lambda: slurm) == at
    assert given_back_at({}, lambda: slurm) is None


def test_a_controller_that_is_away_clears_no_node(slurm: FakeSlurm) -> None:
    """It stays unfit."""

    def away() -> FakeSlurm:
        raise SlurmUnavailable("the controller is down")

    assert given_back_at({"SLURMD_NODENAME": "n1"}, away) is None
