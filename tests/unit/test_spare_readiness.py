"""Which spares are ready, and whether a launcher may use its node as one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from opsd import __version__, exitcodes
from opsd.collectors.base import NoData, Reading
from opsd.collectors.spare import AGE, READY, STAGED, SpareCollector
from opsd.commands.spare import spare
from opsd.config import Settings
from opsd.launch.run.readiness import given_back_at, spare_readiness
from opsd.settings.sections import AgentSettings, SpareSettings
from opsd.slurm import node_comment
from opsd.slurm.node_comment import NodeHistory, Stay
from opsd.slurm.ownership import PreflightResult
from opsd.slurm.port import Node, Reservation, SlurmRejected, SlurmUnavailable
from opsd.spares import pool as state
from opsd.spares.pool import EligibilityUnknownError, Spare, SpareState, judge, mark, pool, reserve, why_not
from opsd.spares.readiness import assessed, software
from tests.fakes.posttrain import make_corpus
from tests.fakes.slurm import FakeSlurm

# Which spares are ready, and why the others are not.


NOW = 1_763_700_000.0

DAY = 86_400.0

SETTINGS = SpareSettings(source="/fsx/shards", folder="/scratch/shards", software={"torch": "2.9", "driver": "580.65"})

GOOD = SpareState(
    source="/fsx/shards",
    folder="/scratch/shards",
    digest="xxh3_128:1",
    staged_at=NOW - 5 * DAY,
    verified_at=NOW - 3600,
    software={"torch": "2.9.1+cu129", "driver": "580.65.06 (open)"},
)

PROOF = PreflightResult(NOW - 7200, passed=True)


def test_a_spare_with_data_software_and_preflight_is_ready() -> None:
    """Until the oldest of its grounds is a day old."""
    verdict = assessed(GOOD, GOOD.digest, PROOF, SETTINGS, NOW)
    assert (verdict.ready, verdict.lacks, verdict.expires_at) == (True, {}, NOW - 7200 + DAY)
    assert assessed(GOOD, "", PROOF, SETTINGS, NOW).ready, "the source need not answer"
    assert assessed(SpareState(), "", PROOF, SpareSettings(), NOW).ready, "nothing to be staged was configured"


@pytest.mark.parametrize(
    ("found", "digest", "preflight", "topic", "why"),
    [
        (SpareState(software=GOOD.software), "", PROOF, "data", "nothing is staged from /fsx/shards"),
        (replace(GOOD, folder="/old"), "", PROOF, "data", "nothing is staged from /fsx/shards to /scratch/shards"),
        (GOOD, "xxh3_128:2", PROOF, "data", "is stale, /fsx/shards has other shards now"),
        (replace(GOOD, damaged=("x was damaged", "y")), "", PROOF, "data", "x was damaged and 1 more; run"),
        (replace(GOOD, verified_at=NOW - 2 * DAY), "", PROOF, "data", "was last read and compared at"),
        (replace(GOOD, software={"torch": "2.90", "driver": "580.65"}), "", PROOF, "software", "torch is 2.90, 2.9 is"),
        (replace(GOOD, software={"torch": "2.9"}), "", PROOF, "software", "driver is missing, 580.65 is wanted"),
        (GOOD, "", None, "preflight", "has passed no preflight spare"),
        (GOOD, "", PreflightResult(NOW - 60, passed=False), "preflight", "failed preflight spare"),
        (GOOD, "", PreflightResult(NOW - 2 * DAY, passed=True), "preflight", "its last preflight spare is of"),
    ],
)
def test_a_spare_that_lacks_anything_is_not_ready(
    found: SpareState, digest: str, preflight: PreflightResult | None, topic: str, why: str
) -> None:
    """And says what, and what to do about it."""
    verdict = assessed(found, digest, preflight, SETTINGS, NOW)
    assert (verdict.ready, verdict.expires_at, list(verdict.lacks)) == (False, 0.0, [topic])
    assert why in verdict.lacks[topic]


DRAINED = Node("n3", "idle", frozenset({"drain"}), "opsd:manual ib_link", "root")


def test_the_pool_names_each_spare_and_what_is_wrong_with_it() -> None:
    """Ready only if Slurm can use the node and its word is fresh; nodes that are no spares are left out."""
    nodes = [*(Node(name, "idle") for name in ("n1", "n2", "n4", "n5", "n6")), DRAINED]
    comments = {
        "n1": f"[opsd1 spare=ready@{NOW - 60:.0f}]",
        "n2": f"rack 12 [opsd1 spare=data,preflight@{NOW - 60:.0f}]",
        "n3": f"[opsd1 spare=ready@{NOW - 60:.0f}]",
        "n4": f"[opsd1 spare=ready@{NOW - 2 * DAY:.0f}]",
        "n6": "no spare",
    }
    found = {spare.node: spare.why_not for spare in judge(nodes, comments, {"n5"}, DAY, NOW)}
    assert list(found) == ["n1", "n2", "n4", "n5", "n3"]
    assert found["n1"] == ""
    assert "lacks data, preflight since" in found["n2"]
    assert found["n3"] == "Slurm has it as idle+drain: opsd:manual ib_link"
    assert "which is too long ago" in found["n4"]
    assert "has not said that it is ready" in found["n5"]


@given(st.text(max_size=30), st.floats(0, 2 * NOW), st.sampled_from(["idle", "down"]))
def test_whatever_a_comment_says_a_spare_is_ready_only_if_it_may_be(comment: str, at: float, base: str) -> None:
    """Never one that Slurm cannot use or whose word is old."""
    told = f"[opsd1 spare={comment}@{at:.0f}]"
    for found in judge([Node("n1", base)], {"n1": told}, {"n1"}, DAY, NOW):
        assert not found.ready or (base == "idle" and comment == "ready" and NOW - at <= DAY + 1)


class Reserving(FakeSlurm):
    """A cluster that keeps the reservations it is asked for."""

    def __init__(self, nodes: list[Node]) -> None:
        super().__init__(nodes)
        self.reserved: dict[str, dict[str, str]] = {}

    def reserve(self, name: str, settings) -> None:
        self.reserved[name] = dict(settings)

    def reservations(self) -> list[Reservation]:
        return [
            Reservation(name, "active", ("n2",), int(s["NodeCnt"]), "", (), frozenset(), None, None)
            for name, s in self.reserved.items()
        ]


def test_a_reservation_is_a_pool() -> None:
    """Slurm chooses the nodes and replaces those that go down; others' reservations are no spares."""
    slurm = Reserving([Node("n1", "idle"), Node("n2", "idle")])
    reserve(slurm, "somebody", count=1, partition="", users="alice")
    assert pool(slurm, "opsd_spares", DAY, NOW) == []
    reserve(slurm, "opsd_spares", count=1, partition="train", users="root")
    assert slurm.reserved["opsd_spares"]["Flags"] == "REPLACE_DOWN"
    assert slurm.reserved["opsd_spares"]["PartitionName"] == "train"
    (found,) = pool(slurm, "opsd_spares", DAY, NOW)
    assert (found.node, found.ready) == ("n2", False)
    mark(slurm, "n2", "ready", NOW)
    assert pool(slurm, "opsd_spares", DAY, NOW) == [Spare("n2", "", NOW)]


def test_a_mark_leaves_the_rest_of_the_comment_alone() -> None:
    """A node's history and other people's words stay, with the mark and after it."""
    slurm = FakeSlurm([Node("n1", "idle")])
    slurm.by_comment["n1"] = "rack 12 [opsd1 ib_link=1-2]"
    mark(slurm, "n1", "ready", NOW)
    assert slurm.by_comment["n1"] == f"rack 12 [opsd1 ib_link=1-2 spare=ready@{NOW:.0f}]"
    assert len(node_comment.read(slurm.by_comment["n1"]).stays) == 1
    mark(slurm, "n1", "", NOW)
    assert slurm.by_comment["n1"] == "rack 12 [opsd1 ib_link=1-2]"
    with pytest.raises(SlurmRejected, match="no node n9; if this machine has another name"):
        mark(slurm, "n9", "ready", NOW)


def values(reading: Reading | NoData) -> dict[str, float]:
    assert isinstance(reading, Reading)
    return {sample.metric.name: sample.value for sample in reading.samples}


def test_the_agent_exports_the_verdict_until_it_expires(tmp_path: Path) -> None:
    """What was ready yesterday is not any more; a file that cannot be read is not ready."""
    verdict = replace(assessed(GOOD, "", PROOF, SETTINGS, NOW), staged_bytes=10**12)
    collector = SpareCollector(tmp_path / state.FILE, wall=lambda: NOW + 100)
    assert isinstance(collector.collect(), NoData)
    state.write(tmp_path, verdict)
    assert state.read(tmp_path) == verdict
    assert (verdict.why_not_ready(NOW), "is too old" in verdict.why_not_ready(NOW + 2 * DAY)) == ("", True)
    assert values(collector.collect()) == {READY.name: 1.0, AGE.name: 100.0, STAGED.name: 1e12}
    later = SpareCollector(tmp_path / state.FILE, wall=lambda: NOW + 2 * DAY)
    assert values(later.collect())[READY.name] == 0.0
    (tmp_path / state.FILE).write_text("[]")
    assert values(collector.collect()) == {READY.name: 0.0}
    assert state.read(tmp_path) is None
    assert isinstance(SpareCollector(None).collect(), NoData)


def test_software_of_this_node_has_opsd_among_it() -> None:
    """Names that spare.software can demand."""
    found = software("n1")
    assert found["opsd"] == __version__
    assert "python" in found


def on(folder: Path, *arguments: str, **changed: object) -> Result:
    """`opsd spare` on a node with the source and the state below ``folder``."""
    settings = {"spare.source": folder / "source", "spare.folder": folder / "nvme", "agent.state_dir": folder / "state"}
    options = [f"--set={key}={value}" for key, value in {**settings, **changed}.items()]
    return CliRunner().invoke(spare, [*options, *arguments], standalone_mode=False)


def test_stale_and_damaged_data_are_found_by_verify(tmp_path: Path) -> None:
    """From staging to a flipped bit to new shards at the source: each time the node says what it lacks."""
    make_corpus(tmp_path / "source")
    staged = on(tmp_path, "stage")
    assert "0.00 GB were missing and are there now" in staged.output
    assert (staged.return_value, "data:" in staged.output) == (exitcodes.FAILED, False)
    assert "preflight: it has passed no preflight spare" in staged.output
    assert "data:" not in on(tmp_path, "verify").output
    has_requirements = on(tmp_path, "status")
    assert (
        has_requirements.return_value,
        "not a ready spare: preflight: it has passed" in has_requirements.output,
    ) == (1, True)
    shard = tmp_path / "nvme/shard-00000.tokens"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert "was damaged and has been removed; run `opsd spare stage` again" in on(tmp_path, "verify").output
    assert not shard.exists()
    assert "data: the data must be read and compared first" in on(tmp_path, "stage").output
    assert "data:" not in on(tmp_path, "verify").output
    make_corpus(tmp_path / "source", seed=1)
    assert "has other shards now; stage it again" in on(tmp_path, "verify").output
    assert "data:" not in on(tmp_path, "stage").output
    (tmp_path / "source").rename(tmp_path / "away")
    gone = on(tmp_path, "verify")
    assert ("compared with what was staged" in gone.output, "data:" in gone.output) == (True, False)
    index = tmp_path / "nvme/index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "vocab": 7}))
    assert "data: its index was changed" in on(tmp_path, "verify").output


def test_what_was_verified_elsewhere_does_not_count(tmp_path: Path) -> None:
    """A folder with the right index is taken over, but not the day on which another folder was read."""
    make_corpus(tmp_path / "source")
    on(tmp_path, "stage")
    make_corpus(tmp_path / "old")
    switched = on(tmp_path, "stage", **{"spare.folder": tmp_path / "old"})
    assert "everything is there" in switched.output
    assert "data: the data must be read and compared first" in switched.output


def test_a_shard_that_cannot_be_read_keeps_a_spare_from_being_ready(tmp_path: Path) -> None:
    """Staging sees a file of the right size and has nothing to do: only reading it again can tell."""
    make_corpus(tmp_path / "source")
    on(tmp_path, "stage")
    known = state.read(tmp_path / "state")
    assert known is not None
    state.write(tmp_path / "state", replace(known, damaged=("shard cannot be read or removed: Input/output error",)))
    staged = on(tmp_path, "stage")
    assert "everything is there" in staged.output
    assert "data: the data must be read and compared first; run `opsd spare verify`" in staged.output


def test_a_released_spare_is_forgotten(tmp_path: Path) -> None:
    """With its data if that is wanted; a second time does no harm."""
    assert "it was never verified" in on(tmp_path, "status").output
    make_corpus(tmp_path / "source")
    on(tmp_path, "stage")
    assert state.read(tmp_path / "state") is not None
    released = on(tmp_path, "release", "--delete")
    assert "deleted 0.00 GB" in released.output
    assert state.read(tmp_path / "state") is None
    assert list((tmp_path / "nvme").iterdir()) == []
    (tmp_path / "nvme").rmdir()
    assert "deleted 0.00 GB" in on(tmp_path, "release", "--delete").output
    assert not (tmp_path / "nvme").exists()


def test_what_is_not_configured_is_said(tmp_path: Path) -> None:
    """One sentence, exit code 2 from the command line."""
    assert "set spare.source and spare.folder" in str(on(tmp_path, "stage", **{"spare.source": ""}).exception)
    missing = on(tmp_path, "stage")
    assert (missing.return_value, "source cannot be read" in missing.output) == (exitcodes.FAILED, True)


# Whether a launcher may use its node as a spare, by the agent's state folder or the node's comment in Slurm.


READY_SPARE = SpareState(ready=True, expires_at=NOW + 60)


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
    state.write(settings.agent.state_dir, READY_SPARE)
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (READY_SPARE, ""),
        (replace(READY_SPARE, expires_at=NOW - 1), "its last verification is too old"),
        (replace(READY_SPARE, ready=False, lacks={"data": "x was damaged"}), "data: x was damaged"),
        (None, "it was never verified"),
    ],
)
def test_the_state_folder_says_it(settings: Settings, slurm: FakeSlurm, found: SpareState | None, why: str) -> None:
    """Only a verdict that is good and still holds lets the node be used; Slurm is not asked."""
    slurm.error = SlurmUnavailable("the controller is away")
    if found is not None:
        state.write(settings.agent.state_dir, found)
    assert why_not(settings, lambda: slurm, lambda: NOW).startswith(why)
    assert bool(why) == bool(why_not(settings, lambda: slurm, lambda: NOW))


def test_without_settings_nothing_is_asked(settings: Settings, slurm: FakeSlurm) -> None:
    """A site that stages nothing and pins no version, or has switched spares off, uses any node."""
    for section in (SpareSettings(), settings.spare.model_copy(update={"enabled": False})):
        assert why_not(settings.model_copy(update={"spare": section}), lambda: slurm, lambda: NOW) == ""
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
