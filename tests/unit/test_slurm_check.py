"""opsd slurm check: what this node may do, and which settings make recovery slow."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.slurm.check import advise, check
from opsd.slurm.port import Node, Partition, SlurmMissing, SlurmUnavailable, Version
from tests.fakes.slurm import FakeSlurm

OLD, NEW = Version(22, 5, 8), Version(25, 11, 2)
DEFAULTS = {
    "SlurmdTimeout": "300 sec",
    "ReturnToService": "2",
    "TCPTimeout": "2 sec",
    "KillWait": "30 sec",
    "PreemptMode": "OFF",
}
FAST = {
    "SlurmdTimeout": "30 sec",
    "ReturnToService": "1",
    "TCPTimeout": "1 sec",
    "KillWait": "5 sec",
    "AuthInfo": "socket=/run/munge/munge.socket.2,cred_expire=5",
    "SchedulerParameters": "batch_sched_delay=0,bf_interval=5,sched_interval=5,defer",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "GANG,REQUEUE",
}


SPARES = Partition("spares", ("n8", "n9"), 10, "REQUEUE")
EVALUATIONS = Partition("evaluations", ("n8", "n9"), 1, "REQUEUE")


def settings(config: dict[str, str], version: Version, *partitions: Partition) -> list[str]:
    """The settings that are advised on; with no other partitions the spares' are as they should be."""
    return [advice.setting for advice in advise(config, version, partitions or (SPARES, EVALUATIONS))]


def test_advises_on_every_default_that_costs_time() -> None:
    """An unchanged slurm.conf gets the whole list, the most expensive setting first, with values and reasons."""
    assert settings(DEFAULTS, OLD) == [
        "SlurmdTimeout", "ReturnToService", "cred_expire", "batch_sched_delay", "bf_interval", "sched_interval",
        "TCPTimeout", "KillWait", "PreemptType",
    ]  # fmt: skip
    first = advise(DEFAULTS, OLD, ())[0]
    assert (first.now, first.recommended) == ("300 sec", "SlurmdTimeout=30")


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_tuned_cluster_gets_no_advice(version: Version) -> None:
    """The recommended settings satisfy the check on every release; other options beside them do not matter."""
    assert settings(FAST, version) == []


def test_new_releases_have_a_setting_of_their_own_for_the_requeue() -> None:
    """From 25.11 on the requeue delay does not have to shorten the life of credentials."""
    without = {key: value for key, value in FAST.items() if key != "AuthInfo"}
    (advice,) = advise(without, NEW, (SPARES, EVALUATIONS))
    assert (advice.setting, advice.now) == ("requeue_delay", "120")
    with_delay = {**without, "SchedulerParameters": FAST["SchedulerParameters"] + ",requeue_delay=0"}
    assert settings(with_delay, NEW) == []
    assert settings(with_delay, OLD) == ["cred_expire"]


def test_a_timeout_of_zero_never_notices() -> None:
    """SlurmdTimeout=0 switches the detection of dead nodes off and is advised against."""
    assert settings({**FAST, "SlurmdTimeout": "0 sec"}, OLD) == ["SlurmdTimeout"]


@pytest.mark.parametrize(
    "evaluations",
    [
        pytest.param(replace(EVALUATIONS, tier=10), id="of the same tier"),
        pytest.param(replace(EVALUATIONS, preempt_mode="OFF"), id="not preempted"),
        pytest.param(replace(EVALUATIONS, nodes=("n1",)), id="on other nodes"),
    ],
)
def test_evaluations_that_would_not_give_way_are_pointed_out(evaluations: Partition) -> None:
    """It takes a partition of a lower tier, on the same nodes, whose jobs may be ended."""
    assert settings(FAST, OLD, SPARES, evaluations) == ["PriorityTier"]


def test_a_period_of_grace_keeps_a_spare_busy() -> None:
    """Jobs that give way only after minutes are pointed out with their partition."""
    (advice,) = advise(FAST, OLD, (SPARES, replace(EVALUATIONS, grace_s=300)))
    assert (advice.setting, advice.now) == ("GraceTime", "300 in partition evaluations")
    assert settings({**FAST, "PreemptMode": "CANCEL"}, OLD) == []
    assert settings({**FAST, "PreemptType": "preempt/qos"}, OLD, SPARES) == []


def test_says_what_an_operator_may_do() -> None:
    """With rights on nodes the report says so, and no node was touched to find out."""
    slurm = FakeSlurm([Node("n1", "idle")], config=FAST)
    report = check(slurm, "n1", no_bindings="pyslurm is not installed")
    texts = [fact.text for fact in report.facts]
    assert report.usable
    assert any(text.startswith("Slurm 22.05.8, the controller answers in") for text in texts)
    assert "node n1 is idle" in texts
    assert any("may drain, resume and down nodes" in text for text in texts)
    assert slurm.updates == []


def test_says_what_an_ordinary_user_may_not_do() -> None:
    """Without rights the report names what is missing and how far private data narrows the view."""
    slurm = FakeSlurm([Node("n1", "idle")], config={**FAST, "PrivateData": "jobs,usage"}, operator=False)
    refused = [fact.text for fact in check(slurm, "n1").facts if fact.ok is False]
    assert [text.split(":")[0] for text in refused] == [
        "may not drain, resume or down nodes",
        "sees only its own jobs (PrivateData=jobs)",
    ]


def test_says_that_slurm_does_not_know_this_node() -> None:
    """A host name that is not Slurm's name of the node is pointed out with the setting that corrects it."""
    facts = check(FakeSlurm([Node("n1", "idle")], config=FAST), "n1.example.org").facts
    assert any(
        fact.ok is False and "no node n1.example.org" in fact.text and "agent.node" in fact.text for fact in facts
    )


def test_shows_the_state_and_reason_of_a_drained_node() -> None:
    """Who took the node out of service, and why, stands in the report."""
    node = Node("n1", "idle", frozenset({"drain"}), "NHC: disk", "root")
    facts = check(FakeSlurm([node], config=FAST), "n1").facts
    assert any(fact.text == "node n1 is idle+drain: NHC: disk (by root)" and fact.ok is False for fact in facts)


@pytest.mark.parametrize("error", [SlurmUnavailable("the controller is away"), SlurmMissing("no Slurm here")])
def test_without_slurm_one_sentence_says_why(error: SlurmUnavailable | SlurmMissing) -> None:
    """Nothing can be done: the report is the reason alone."""
    slurm = FakeSlurm([Node("n1", "idle")])
    slurm.error = error
    report = check(slurm, "n1")
    assert not report.usable
    assert [fact.text for fact in report.facts] == [str(error)]


def test_the_command_on_a_machine_without_slurm(tmp_path: Path) -> None:
    """One sentence and exit code 1, never a traceback; a wrong option is exit code 2."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "opsd", "slurm", "check", *options]
        return subprocess.run(argv, capture_output=True, text=True, env={"PATH": str(tmp_path)}, check=False)

    text, as_json, wrong = run(), run("--json"), run("--deadline=-1")
    assert text.returncode == exitcodes.FAILED
    assert "scontrol cannot be run (No such file or directory): install Slurm's client commands" in text.stdout
    assert text.stderr == ""
    assert json.loads(as_json.stdout)["usable"] is False
    assert wrong.returncode == exitcodes.USAGE
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    ("timeout", "operator", "told"),
    [("300 sec", False, "400 s"), ("300 sec", True, ""), ("30 sec", False, ""), ("0 sec", False, "")],
)
def test_an_ordinary_user_hears_what_the_loss_of_a_batch_host_costs(timeout: str, operator: bool, told: str) -> None:
    """And what an administrator could do about it, or the user."""
    slurm = FakeSlurm([Node("n1", "idle")], operator=operator, config={**DEFAULTS, "SlurmdTimeout": timeout})
    facts = [fact.text for fact in check(slurm, "n1").facts if "until Slurm notices" in fact.text]
    assert len(facts) == bool(told)
    assert all(told in fact and "adminlevel=operator" in fact for fact in facts)
