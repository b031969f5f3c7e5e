"""The port on top of Slurm's commands, on outputs recorded from four releases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from opsd.slurm import gres_devices, job_faults, topology
from opsd.slurm.commands import NOTES, CommandSlurm, random_separator
from opsd.slurm.output import (
    failure,
    parse_configuration,
    parse_given,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_reservations,
    parse_version,
)
from opsd.slurm.port import (
    Given,
    Partition,
    SlurmDenied,
    SlurmError,
    SlurmMissing,
    SlurmRejected,
    SlurmUnavailable,
    Version,
)
from opsd.slurm.runner import Output
from tests.fakes.slurm import RELEASES, SEPARATOR, RecordedRunner


@pytest.fixture(params=RELEASES)
def slurm(request: pytest.FixtureRequest) -> CommandSlurm:
    """The port on one recorded release."""
    return CommandSlurm(RecordedRunner(request.param), separator=lambda: SEPARATOR)


def test_the_oldest_and_newest_supported_releases_are_recorded() -> None:
    """The tests below cover 22.05 and 26.05."""
    assert RELEASES[0].startswith("22.05")
    assert RELEASES[-1].startswith("26.05")


def test_reads_the_release(slurm: CommandSlurm) -> None:
    """The version is that of the file the answers were recorded in."""
    assert str(slurm.version) in RELEASES


def test_reads_nodes_with_state_and_reason(slurm: CommandSlurm) -> None:
    """State, flags and reasons come through whole, quotes and look-alikes of other fields included."""
    n1, n2, n3, n4 = slurm.nodes()
    assert (n1.name, n1.state, n1.reason, n1.reason_by, n1.reason_at) == ("n1", "mixed", "", "", None)
    assert n1.busy
    assert n2.usable
    assert (n3.flags, n3.reason, n3.reason_by) == ({"drain"}, "NHC: check_fs /scratch", "root")
    assert n3.reason_at is not None
    assert not n3.usable
    assert n4.reason == 'opsd:42 gpu_xid: Xid 79 | State=IDLE, "see" /var/lib/opsd'
    assert {"drain"} <= n4.flags
    assert not n4.busy


def test_nodes_that_slurm_does_not_know_are_left_out(slurm: CommandSlurm) -> None:
    """Asking for n9, which does not exist, is not an error."""
    assert [node.name for node in slurm.nodes(["n3", "n4", "n9"])] == ["n3", "n4"]


def test_reads_jobs(slurm: CommandSlurm) -> None:
    """Running, pending and array jobs are read; a line end in a job name does not make another job."""
    jobs = {job.id: job for job in slurm.jobs()}
    assert sorted(jobs) == [1, 2, 3]
    running, later = jobs[1], jobs[2]
    assert (running.state, running.nodes, running.batch_host) == ("running", ("n1", "n2"), "n1")
    assert (running.user, running.partition, running.restarts, running.reason) == ("nobody", "train", 0, "")
    assert running.name == "train\n99 x"
    assert running.ends_at is None
    assert (later.state, later.reason, later.partition, later.nodes) == ("pending", "BeginTime", "dev", ())
    assert later.starts_at is not None
    assert later.ends_at == later.starts_at + 3600


def test_jobs_that_have_gone_are_left_out(slurm: CommandSlurm) -> None:
    """An id that Slurm has forgotten gives no job, alone or among others."""
    assert [job.id for job in slurm.jobs([1, 999])] == [1]
    assert list(slurm.jobs([999])) == []
    assert [job.id for job in slurm.jobs(node="n2")] == [1]


def test_reads_reservations(slurm: CommandSlurm) -> None:
    """Name, nodes, users, flags and times of a reservation are read."""
    (spares,) = slurm.reservations()
    assert (spares.name, spares.state, spares.nodes, spares.node_count) == ("opsd_spares", "active", ("n4",), 1)
    assert spares.users == ("root",)
    assert "MAINT" in spares.flags
    assert spares.starts_at is not None
    assert spares.ends_at == spares.starts_at + 3600


def test_reads_comments(slurm: CommandSlurm) -> None:
    """Of nodes whole, and of jobs the nodes that opsd keeps them off, whatever else is in the comment."""
    none = dict.fromkeys(("n1", "n2", "n3"), "")
    assert slurm.comments() == {**none, "n4": 'rack 12, "opsd1" | Comment=x'}
    assert (slurm.excluded(1), slurm.excluded(2)) == ({}, {"n3": 1_763_711_000.0})


def test_reads_partitions(slurm: CommandSlurm) -> None:
    """What 26.05 has renamed in between (``Exclusive=``) is none of what is read."""
    train, dev = slurm.partitions()
    assert train == Partition("train", ("n1", "n2", "n3", "n4"), 10, "REQUEUE", 0, "up")
    assert (dev.name, dev.tier) == ("dev", 1)


def test_reads_steps_and_gpus(slurm: CommandSlurm) -> None:
    """The batch script is no step; a line end in the name and the comment of the job hides nothing."""
    assert (slurm.steps(1), slurm.steps(999)) == ({"0": {"n2"}}, {})
    given = slurm.given(1, "n1")
    assert given.gpus == {0, 1}
    assert bool(given.sluid) is (slurm.version >= Version(25, 11))


@pytest.mark.parametrize("version", RELEASES)
def test_reads_what_other_commands_print(version: str) -> None:
    """The device files, in their order; the switches; and the node on which each start failed."""
    run = RecordedRunner(version)
    assert gres_devices.read("n1", run, environ={}, configless=Path("/nowhere")) == (("gpu0",), ("gpu1",))
    tree = topology.parse(run(["scontrol", "show", "topology"], 1.0).stdout)
    assert (tree.leaf, tree.above) == (
        {"n1": "a", "n2": "a", "n3": "b", "n4": "b"}, {"a": "s", "b": "s"},
    )  # fmt: skip
    faults = job_faults.read(run, 1_692_273_600.0, days=0, user="")
    assert sorted(fault.node for fault in faults) == ["n1", "n3", "n3"]


def test_reads_the_configuration(slurm: CommandSlurm) -> None:
    """Settings are found under their names, unset ones are missing."""
    config = slurm.configuration()
    assert config["SlurmdTimeout"] == "30 sec"
    assert config["AuthInfo"] == "cred_expire=5"
    assert "HealthCheckProgram" not in config
    assert slurm.responds()


@pytest.mark.parametrize(
    ("refuse", "kind", "words"),
    [
        (lambda s: s.update_nodes(["n1"], "drain", "opsd:1 refused"), SlurmDenied, "root, SlurmUser, an operator"),
        (lambda s: s.set_comment("n1", "refused"), SlurmDenied, "root, SlurmUser, an operator"),
        (lambda s: s.requeue(999), SlurmRejected, "Invalid job id"),
        (lambda s: s.given(999, "n1"), SlurmRejected, "Invalid job id"),
        (lambda s: s.unreserve("nothing"), SlurmRejected, "reservation is invalid"),
        (lambda s: s.update_nodes(["n9"], "resume"), SlurmRejected, "Invalid node name"),
        (lambda s: s.submit("#!/bin/sh\n", ["--partition=nowhere"]), SlurmRejected, "Invalid partition name"),
    ],
)
def test_refusals_are_one_sentence_of_the_right_kind(
    slurm: CommandSlurm, refuse: Callable[[CommandSlurm], object], kind: type[SlurmError], words: str
) -> None:
    """Each way of saying no is told apart and names the command."""
    with pytest.raises(kind, match=words) as caught:
        refuse(slurm)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("slurm_load_node error: Unable to contact slurm controller (connect failure)", SlurmUnavailable),
        ("slurm_load_partitions: Connection reset by peer", SlurmUnavailable),
        ("slurm_load_partitions: Socket timed out on send/recv operation", SlurmUnavailable),
        ("sinfo: error: If munged is up, restart with --num-threads=10\nMunge encode failed: ...", SlurmUnavailable),
        ("scontrol: fatal: Could not establish a configuration source", SlurmMissing),
        ("Access/permission denied for job 1", SlurmDenied),
        ("slurm_update error: Requested operation is presently disabled", SlurmRejected),
        ("", SlurmRejected),
    ],
)
def test_failures_are_told_apart_by_what_slurm_says(said: str, kind: type[SlurmError]) -> None:
    """Trying again makes sense for an absent controller only, so it must not be taken for a refusal."""
    assert type(failure(["scontrol", "update", "x"], Output(1, "", said))) is kind


def test_a_release_before_22_05_is_refused() -> None:
    """Slurm 21.08 has no StateComplete field; the sentence says which release is needed."""
    with pytest.raises(SlurmMissing, match=r"21\.08\.8 is too old: opsd needs 22\.05"):
        parse_version("slurm 21.08.8-2\n")
    with pytest.raises(SlurmMissing, match="not a Slurm release"):
        parse_version("command not found")


@pytest.mark.parametrize("parse", [parse_nodes, parse_jobs])
@pytest.mark.parametrize(
    "text", ["slurm_load error\n", "n1|idle", "n1|idle|1|root|opsd:1 x|\nn2|id", "a|b|c|d|e|f|g|\n"]
)
def test_answers_cut_in_half_are_refused(parse: Callable[[str, str], Sequence[object]], text: str) -> None:
    """Half an answer is no answer: a node that is missing from it must not look undrained."""
    with pytest.raises(SlurmRejected):
        parse(text, "|")


def test_an_empty_answer_is_no_nodes() -> None:
    """Where no node matches sinfo prints nothing."""
    assert parse_nodes("", "|") == ()


def test_the_names_of_a_merged_line_become_nodes() -> None:
    """Nodes that agree in everything are merged by sinfo; 10,000 of them are one line."""
    nodes = parse_nodes("x[00001-10000]|down+drain|1700000000|root|opsd:7 power|\n", "|")
    assert len(nodes) == 10_000
    assert nodes[9_999].name == "x10000"
    assert {node.flags for node in nodes} == {frozenset({"drain"})}


def test_separators_differ_between_calls() -> None:
    """Nobody who names a job can know the separator of the next call."""
    assert random_separator() != random_separator()


def test_settings_without_a_value_are_left_out() -> None:
    """(null) means unset; headlines of the output are no settings."""
    text = "Configuration data as of 1\nSchedulerParameters   = (null)\nKillWait = 30 sec\n\nSlurmctld(primary) is UP\n"
    assert parse_configuration(text) == {"KillWait": "30 sec"}


def test_what_opsd_keeps_a_job_off_is_noted_beside_what_its_user_does() -> None:
    """In the comment of the job, where the user's own words stay; only the own nodes are ever taken back."""
    excluded, comment = "n4", "tuning run 12"

    def answer(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        nonlocal excluded, comment
        if argv[0] == "squeue":
            told = ["7"] if "JobArrayID" in argv[-1] else [comment, "(null)"]
            return Output(0, SEPARATOR.join(["7", *told, "\n"]), "")
        if argv[1] == "update":
            excluded, comment = (word.partition("=")[2] for word in argv[3:])
        return Output(0, f"JobId=7 ReqNodeList=(null) ExcNodeList={excluded or '(null)'} Comment={comment}", "")

    slurm = CommandSlurm(answer, separator=lambda: SEPARATOR)
    slurm.exclude(7, ["n2", "n4"], 1_763_711_000.0)
    slurm.exclude(7, ["n3"], 1_763_712_000.0)
    assert (excluded, comment) == ("n[2-4]", "tuning run 12 [opsd1 avoids n2@1763711000 n3@1763712000]")
    assert slurm.excluded(7) == {"n2": 1_763_711_000.0, "n3": 1_763_712_000.0}
    slurm.include(7, ["n2", "n3", "n4"])
    assert (excluded, comment, slurm.excluded(7)) == ("n4", "tuning run 12", {})


@pytest.mark.parametrize("operator", [True, False])
def test_the_summary_of_a_run_leaves_other_words_in_the_comments(operator: bool) -> None:
    """Administrators' comment first, the user's own if that is denied; a second summary replaces the first."""
    kept = {"comment": "mine [opsd1 avoids n2@1763711000]", "admincomment": "site 5"}

    def answer(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        if argv[0] == "squeue":
            told = ["7"] if "JobArrayID" in argv[-1] else [kept["comment"], kept["admincomment"]]
            return Output(0, SEPARATOR.join(["7", *told, "\n"]), "")
        key, _, text = argv[3].partition("=")
        if key == "admincomment" and not operator:
            return Output(1, "", "slurm_update error: Access/permission denied")
        kept[key] = text
        return Output(0, "", "")

    slurm = CommandSlurm(answer, separator=lambda: SEPARATOR)
    for text in ("stopped", "finished:\n12 [steps]"):
        slurm.summarize(7, text)
    summary = "[opsd run: finished: 12 (steps)]"
    if operator:
        assert kept == {"comment": "mine [opsd1 avoids n2@1763711000]", "admincomment": f"site 5 {summary}"}
    else:
        assert kept == {"comment": f"mine [opsd1 avoids n2@1763711000] {summary}", "admincomment": "site 5"}


def test_each_node_of_a_job_has_a_note_of_its_own() -> None:
    """The newest few: a job may have a thousand nodes. One node's replaces its own only."""
    kept = "site 5"

    def answer(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        nonlocal kept
        if argv[0] == "squeue":
            told = ["7"] if "JobArrayID" in argv[-1] else ["", kept]
            return Output(0, SEPARATOR.join(["7", *told, "\n"]), "")
        kept = argv[3].partition("=")[2]
        return Output(0, "", "")

    slurm = CommandSlurm(answer, separator=lambda: SEPARATOR)
    for node, text in (("n1", "a"), ("n10", "b"), ("n1", "c")):
        slurm.summarize(7, text, f"idle {node}")
    slurm.summarize(7, "ended")
    assert kept == "site 5 [opsd idle n10: b] [opsd idle n1: c] [opsd run: ended]"
    for number in range(20, 20 + NOTES):
        slurm.summarize(7, "d", f"idle n{number}")
    assert kept.startswith("site 5 [opsd run: ended] [opsd idle n20: d]")
    assert kept.count("[opsd idle") == NOTES


DETAILS = """JobId=7 JobName={name}
   NodeList=n[1-7] BatchHost=n1 NumNodes=7
   JOB_GRES=gpu:h100:6
     Nodes=n[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:h100:3(IDX:0,2-3),nic:1(IDX:5)
     Nodes=n3 CPU_IDs=0-1 Mem=0 GRES=
     Nodes=n4 CPU_IDs=0-1 Mem=0 GRES=gpu:1g.10gb:1(IDX:4),gpu:h100:1(IDX:0)
     Nodes=n5 CPU_IDs=0-1 Mem=0 GRES=gpu:2
     Nodes=n7 CPU_IDs=0-1 Mem=0 GRES=gpu(IDX:4-7)
   Command=/home/ada/train.sh
"""


@pytest.mark.parametrize(
    ("node", "gpus"),
    [
        ("n1", {0, 2, 3}),
        ("n2", {0, 2, 3}),
        ("n3", set()),
        ("n4", {0, 4}),
        ("n5", None),
        ("n7", None),
        ("n8", None),
    ],
)
def test_the_gpus_of_a_job_are_those_that_slurm_numbers(node: str, gpus: set[int] | None) -> None:
    """Several nodes on a line, several types, none, and some without numbers; one that old releases wrote."""
    assert parse_given(DETAILS.format(name="train"), node) == Given(gpus)


@pytest.mark.parametrize(
    ("gres", "gpus", "shares"),
    [
        ("shard:3(IDX:0)", set(), {0}),
        ("shard:a100:14(4/4,0/4,10/10,0/4)", set(), {0, 2}),
        ("mps:50(0/100,50/100)", set(), {1}),
        ("gpu:b:1(IDX:2),shard:2(IDX:0-1)", {2}, {0, 1}),
        ("gpu:(null):2(IDX:0-1),shard:2(CNT:2)", {0, 1}, set()),
    ],
)
def test_parts_of_gpus_are_told_from_whole_ones(gres: str, gpus: set[int], shares: set[int]) -> None:
    """By their numbers on 22.05.8, by what is taken of each GPU on 25.11.7 and 26.05.3."""
    shown = f"JobId=7 JobName=x\n     Nodes=n1 CPU_IDs=0 Mem=100 GRES={gres}\n"
    assert parse_given(shown, "n1") == Given(frozenset(gpus), "", frozenset(shares))


def test_a_jobs_name_cannot_claim_the_gpus_of_others() -> None:
    """A second line about the same node makes Slurm's answer worth nothing."""
    forged = "x\n     Nodes=n3 CPU_IDs=0-1 Mem=0 GRES=gpu:8(IDX:0-7)"
    assert parse_given(DETAILS.format(name=forged), "n3") == Given(None)


def test_a_job_has_one_sluid() -> None:
    """As 25.11 and newer print it; a name with a second one makes both worth nothing."""
    told = "train\n   SLUID=sEKNKTV3WPV500"
    assert parse_given(DETAILS.format(name=told), "n3") == Given(frozenset(), "sEKNKTV3WPV500")
    assert parse_given(DETAILS.format(name=f"x\n   SLUID=sEKNKTV3WPV501{told[5:]}"), "n3") == Given(frozenset())


def test_a_node_is_down_after_a_reboot() -> None:
    """Without that state a drained node would be in service again, untested, and its reason gone."""
    asked: list[Sequence[str]] = []

    def run(argv: Sequence[str], _deadline_s: float, stdin: str = "") -> Output:
        asked.append(argv)
        return Output(0, stdin, "")

    CommandSlurm(run).reboot("n1", "opsd:x gpu_xid: Xid 95")
    assert asked == [("scontrol", "reboot", "ASAP", "nextstate=down", "reason=opsd:x gpu_xid: Xid 95", "n1")]


def test_reads_partitions_as_24_11_prints_them() -> None:
    """With node sets, a state in which no job starts, no nodes, and a name of several words."""
    rest = "AllowGroups=ALL AllocNodes=ALL Default=NO ExclusiveTopo=NO GraceTime=120 MinNodes=0 NodeSets=racks"
    after = "PriorityJobFactor=1 PriorityTier=7 RootOnly=NO PreemptMode=REQUEUE State={} TotalNodes=3"
    train, empty = parse_partitions(
        f"PartitionName=train {rest} Nodes=gh[101-103] {after.format('DRAIN')}\n"
        f"PartitionName=CPU nodes (amd) {rest} Nodes=(null) {after.format('UP')}\n"
    )
    assert train == Partition("train", ("gh101", "gh102", "gh103"), 7, "REQUEUE", 120, "drain")
    assert (empty.name, empty.nodes, empty.state) == ("CPU nodes (amd)", (), "up")


def test_words_of_people_are_none_of_a_reservation_s_values() -> None:
    """Its name may have several, and who may reserve nodes may write anything into its comment."""
    (found,) = parse_reservations(
        "ReservationName=maintenance weekend 2023-10-14 StartTime=1 EndTime=2 Duration=00:00:01 "
        "Nodes=n[1-2] NodeCnt=2 CoreCnt=8 Features=(null) PartitionName=gpu Flags=SPEC_NODES TRES=cpu=8 Users=root "
        "Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) MaxStartDelay=(null) "
        "Comment=was Nodes=n[1-9 NodeCnt=nine Users=ann State=INACTIVE\n"
    )
    assert (found.name, found.starts_at) == ("maintenance weekend 2023-10-14", 1.0)
    assert (found.nodes, found.node_count, found.users, found.state) == (("n1", "n2"), 2, ("root",), "active")
