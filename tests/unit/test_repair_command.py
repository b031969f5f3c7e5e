"""`opsd repair` and `opsd evidence` as people call them, on a machine whose Slurm is a program of four lines."""

from __future__ import annotations

import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pydantic import TypeAdapter

from opsd import exitcodes
from opsd.commands.evidence import evidence
from opsd.commands.repair import repair, tell
from opsd.config import load
from opsd.repair.case_file import CaseFile
from opsd.repair.repair_plan import Case, Remedy, closed
from tests.fakes.webhook import Webhook

CASE = Case("repair-1", "n1", "gpu_xid", "opsd:gpu_xid-1 gpu_xid: Xid 95", 1000.0, first=Remedy.RESET)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings of a node without GPUs, where Slurm's commands do not exist."""
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = {"agent.node": "n1", "agent.state_dir": tmp_path / "state", "nvml.enabled": "false"}
    return [f"--set={key}={value}" for key, value in settings.items()]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(repair, arguments, standalone_mode=False)


def test_without_slurm_it_is_one_sentence(options: list[str]) -> None:
    """With the fix."""
    done = CliRunner().invoke(repair, options)
    assert (done.exit_code, done.stdout) == (exitcodes.FAILED, "")
    assert done.stderr.startswith("opsd: Slurm: sinfo cannot be run")


def test_another_node_is_repaired_there(options: list[str]) -> None:
    """The remedies are local."""
    done = CliRunner().invoke(repair, ["n2", *options])
    assert "this is n1: run the command on n2" in done.stderr
    assert "this is n1: run the command on n2" in CliRunner().invoke(evidence, ["n2", *options]).stderr


def test_the_record_of_another_node_is_no_repair_of_this_one(options: list[str], tmp_path: Path) -> None:
    """A disk was copied with the state folder on it."""
    cases = CaseFile(tmp_path / "state")
    cases.keep(replace(CASE, node="n2"))
    for how in ([], ["--act"], ["--ordered"]):
        done = CliRunner().invoke(repair, [*how, *options])
        assert (done.exit_code, done.stdout) == (exitcodes.FAILED, "")
        assert "case.json is a repair of n2, and this is n1: move it away" in done.stderr
    cases.keep(closed(replace(CASE, node="n2"), "returned", "", 1000.0))
    assert (cases.recent("n1", 1001.0), cases.recent("n2", 1001.0)) == (0, 1)
    assert cases.recent("n2", 999.0) == 0, "opened in the future: the clock was set"
    assert cases.recent("n2", 1001.0, since=1000.5) == 0, "its hardware was replaced since"


def test_an_order_counts_only_where_the_policy_says_so(options: list[str], tmp_path: Path) -> None:
    """Otherwise it is dropped, or the unit would start again and again."""
    cases = CaseFile(tmp_path / "state")
    cases.order()
    done = call("--ordered", *options)
    assert (done.return_value, "policy.repair is observe" in done.output) == (exitcodes.OK, True)
    assert not cases.ordered
    acting = call("--ordered", "--set=policy.repair=act", *options)
    assert (acting.return_value, "no repair was ordered" in acting.output) == (exitcodes.OK, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="repairs are root's")
def test_a_policy_that_was_taken_back_ends_its_repairs(options: list[str], tmp_path: Path) -> None:
    """After the reboot as well; one that a person has begun goes on."""
    cases = CaseFile(tmp_path / "state")
    cases.keep(CASE)
    assert call("--ordered", *options).return_value == exitcodes.FAILED
    assert cases.current() is None
    assert [case.verdict for case in cases.past()] == ["policy.repair is observe now"]
    by_hand = replace(CASE, id="repair-2", by_hand=True, end="returned", ended_at=2000.0)
    (tmp_path / "state/repair/case.json").write_text(TypeAdapter(Case).dump_json(by_hand).decode())
    assert call("--ordered", *options).return_value == exitcodes.OK


def test_an_order_stays_while_slurm_does_not_answer(options: list[str], tmp_path: Path) -> None:
    """The unit tries again."""
    CaseFile(tmp_path / "state").order()
    done = CliRunner().invoke(repair, ["--ordered", "--set=policy.repair=act", *options])
    assert done.exit_code == exitcodes.FAILED
    assert CaseFile(tmp_path / "state").ordered


def test_a_repair_under_way_is_shown(options: list[str], tmp_path: Path) -> None:
    """As text and as JSON, also while Slurm does not answer."""
    CaseFile(tmp_path / "state").keep(CASE)
    assert call(*options).output == "n1: wait; Slurm does not answer\n"
    shown = json.loads(call("--json", *options).output)
    assert (shown["under_way"], shown["case"]["id"], shown["next"]["do"]) == (True, "repair-1", "wait")
    CaseFile(tmp_path / "state").keep(replace(CASE, paused="maintenance: new firmware"))
    assert call(*options).output == "n1: wait; maintenance: new firmware\n"


def test_a_record_that_cannot_be_read_is_one_sentence(options: list[str], tmp_path: Path) -> None:
    """With the fix."""
    (tmp_path / "state/repair").mkdir(parents=True)
    (tmp_path / "state/repair/case.json").write_text("{}")
    done = CliRunner().invoke(repair, options)
    assert done.stderr.endswith("it is no record of this opsd, or not root's); move it away to begin a new repair\n")


def test_evidence_is_written_where_nothing_is_installed(options: list[str], tmp_path: Path) -> None:
    """Its name and size, for people and programs; a folder that does not exist is one sentence."""
    out = tmp_path / "out.tar.gz"
    made = CliRunner().invoke(evidence, ["--json", "--out", str(out), *options])
    assert json.loads(made.output)["bytes"] == out.stat().st_size
    refused = CliRunner().invoke(evidence, ["--out", str(tmp_path / "none/out.tar.gz"), *options])
    assert (refused.exit_code, "cannot be written: No such file" in refused.stderr) == (exitcodes.FAILED, True)


def test_evidence_goes_to_a_pipe(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not into a file of the name "-", nor beside a JSON object."""
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(evidence, ["--out", "-", *options])
    with tarfile.open(fileobj=io.BytesIO(made.stdout_bytes)) as archive:
        assert any(name.endswith("/index.json") for name in archive.getnames())
    assert not (tmp_path / "-").exists()
    refused = CliRunner().invoke(evidence, ["--out", "-", "--json", *options])
    assert (refused.exit_code, "without --json" in refused.stderr) == (exitcodes.USAGE, True)


def test_people_are_told_how_it_has_ended(tmp_path: Path) -> None:
    """Where they are told of incidents, and not in a time for which that is muted."""
    case = closed(CASE, "rma", "3 attempts without success", 2000.0, "/evidence.tar.gz")
    webhook = Webhook()
    try:
        told = load(None, (f"notify.webhook={webhook.url}", f"agent.state_dir={tmp_path}"))
        tell(told, case)
        muted = 'policy.mute=[{weekly = "mon 00:00 - mon 00:00"}]'
        tell(load(None, (f"notify.webhook={webhook.url}", muted)), case)
    finally:
        webhook.shutdown()
        webhook.server_close()
    (post,) = webhook.posts
    assert "n1: has to be replaced: 3 attempts without success" in json.dumps(post)


def test_a_record_that_another_user_has_written_decides_nothing(options: list[str], tmp_path: Path) -> None:
    """Nor one that is no file: root would wait for a pipe, and follow a link."""
    cases = CaseFile(tmp_path / "state")
    cases.keep(closed(CASE, "returned", "", 1000.0))
    cases.keep(CASE)
    for path in (cases.folder / "case.json", cases.folder / f"{CASE.id}.json"):
        os.chown(path, 12345, 12345)
    os.mkfifo(cases.folder / "repair-20990101T000000.json")
    assert cases.past() == []
    assert "or not root's); move it away" in CliRunner().invoke(repair, ["--act", *options]).stderr
