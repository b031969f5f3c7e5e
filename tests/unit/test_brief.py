"""What people read of an incident: its brief, the diagnosis of a run, and similar ones."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from opsd import exitcodes
from opsd.agent.brief import PLACEHOLDER, brief, fill, values
from opsd.agent.diagnosis import Diagnosis, diagnose, to_rank
from opsd.agent.loop import Snapshot
from opsd.agent.metrics import brief_samples
from opsd.agent.policy import DRAIN_OFF
from opsd.agent.similar_incidents import nearest, signature, similarity, statistics
from opsd.agent.web import api
from opsd.collectors.base import RankFact
from opsd.commands.diagnose import _lines
from opsd.commands.main import cli
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Acknowledgement, Cost, Culprit, Evidence, Incident, Severity, State
from opsd.scenarios.model import load
from opsd.scenarios.player import play
from tests.fakes.facts import rank, steps
from tests.fakes.incidents import WALL, incident

# The brief of an incident: what happened, what it costs, who acts, and a command that can be pasted.


LIMIT = {"verb": "set_power_limit", "target": "GPU-1", "args": {"gpu": 3, "watts": 595, "restore_watts": 700}}

DRAIN = {"verb": "drain_node", "target": "n17", "args": {"node": "n17"}}


def hot(**changes: object) -> Incident:
    """A throttled GPU whose runbook asks for a lower power limit."""
    base = incident(
        "gpu_throttle-1", kind="gpu_throttle", summary="GPU 3 is throttled by sw_thermal", actions=(),
        culprit=Culprit("gpu", "n17", 3), proposed=(LIMIT,),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "changes", "acts", "command"),
    [
        ("observe", {}, "you act: opsd only observes; it would set the power", "nvidia-smi -i 3 -pl 595"),
        ("recommend", {}, "you act: opsd recommends to set the power limit of GPU 3 to 595", "nvidia-smi -i 3 -pl 595"),
        ("act", {}, "opsd acts: it will set the power limit of GPU 3 to 595 W", "opsd incidents show gpu_throttle-1"),
        ("act", {"state": State.VERIFYING, "actions": ({**LIMIT, "outcome": "ok"},)}, "opsd has acted",
         "opsd incidents show gpu_throttle-1"),
        ("act", {"state": State.VERIFYING, "actions": ({**LIMIT, "outcome": "failed", "detail": "no driver"},)},
         "you act: opsd could not set the power limit of GPU 3 to 595 W (no driver)", "nvidia-smi -i 3 -pl 595"),
        ("act", {"proposed": (DRAIN, LIMIT), "actions": ({**DRAIN, "detail": DRAIN_OFF},)},
         "opsd acts: it will set the power limit of GPU 3 to 595 W", "opsd incidents show gpu_throttle-1"),
        ("act", {"state": State.ESCALATED, "verdict": "not over"}, "you act: opsd could not end it (not over)",
         "nvidia-smi -i 3 -pl 595"),
        ("act", {"actions": ({"verb": "set_power_limit", "outcome": "refused", "detail": "maintenance"},)},
         "you act: opsd may not set the power limit of GPU 3 to 595 W now (maintenance)", "nvidia-smi -i 3 -pl 595"),
        ("act", {"cause": "node_throttle-2"}, "nobody acts on a symptom", "opsd incidents show node_throttle-2"),
        ("act", {"resolved_at": WALL}, "nobody has to act", "opsd incidents show gpu_throttle-1"),
        ("act", {"proposed": ()}, "you act: opsd has no remedy", "opsd drain n17 --incident gpu_throttle-1 --reason "),
    ],
)  # fmt: skip
def test_who_acts_and_with_what(mode: str, changes: dict[str, object], acts: str, command: str) -> None:
    """By mode, state and what the policy has refused."""
    told = brief(hot(**changes), mode, "n17")
    assert told.acts.startswith(acts) and told.command.startswith(command)


@pytest.mark.parametrize("book", RUNBOOKS, ids=lambda book: book.kind)
@pytest.mark.parametrize("culprit", [Culprit("gpu", "n17", 3, 5), Culprit("node")], ids=["gpu", "nothing known"])
def test_every_kind_has_a_whole_command(book, culprit) -> None:
    """Whatever is known of the incident, no placeholder is left."""
    assert book.first
    told = brief(incident(kind=book.kind, culprit=culprit, data={}, job="", actions=()), "observe", "n17")
    assert told.command and not PLACEHOLDER.search(told.command.partition("--reason")[0])


@given(st.text())
def test_what_users_write_is_one_word_of_the_command(summary: str) -> None:
    """A summary or folder with quotes and semicolons starts no second command."""
    told = brief(hot(proposed=(), kind="gpu_lost", summary=summary), "observe", "n17")
    words = shlex.split(told.command)
    assert words[:5] == ["opsd", "drain", "n17", "--incident", "gpu_throttle-1"] and len(words) <= 7


def test_the_cost_is_the_present_loss_and_then_the_sum() -> None:
    """An unknown one says so."""
    assert brief(hot(cost=Cost(0.1, 720.0, "a tenth")), "act", "n").cost == "a tenth; 0.20 GPU-hours so far"
    assert (
        brief(hot(cost=Cost(0.1, 720.0, "a tenth", 4), resolved_at=WALL), "act", "n").cost
        == "0.20 GPU-hours altogether"
    )
    assert brief(hot(cost=Cost()), "act", "n").cost == "not known"


def test_guides_are_filled_where_it_is_known() -> None:
    """What is not known stays visible."""
    known = values(hot(job=""), "n17")
    assert (
        fill("nvidia-smi -i GPU -pl WATTS; scontrol requeue JOB", known)
        == "nvidia-smi -i 3 -pl 595; scontrol requeue JOB"
    )


@pytest.mark.parametrize(
    ("timeline", "kind", "command"),
    [
        ("gpu_capped/power_limit", "gpu_capped", "nvidia-smi -i 2 -pl 700"),
        ("loss_nan/run_stops", "rank_crash", "opsd report /home/user/.local/state/opsd/runs/smol --text"),
    ],
)
def test_what_runbooks_and_judge_know_is_in_the_command(timeline: str, kind: str, command: str) -> None:
    """The default limit in watts, and the folder of the run: nothing is left for a person to look up."""
    played = play(load(Path(__file__).parents[1] / "scenarios" / f"{timeline}.toml"), "observe")
    (found,) = (incident for incident in played.incidents.values() if incident.kind == kind)
    assert brief(found, "observe", "n01").command == command


def test_alerts_get_the_brief_of_incidents_that_wait_for_somebody() -> None:
    """The gravest come first, at most 32. Another series has the loss by kind and GPU."""
    first = hot(id="hot")
    told = brief(first, "observe", "n17")
    acknowledged = replace(first, id="had", ack=Acknowledgement("anna", WALL, None))
    symptom = replace(first, id="symptom", cause="hot")
    found = list(brief_samples([first, acknowledged, symptom], lambda _kind: "observe", "n17"))
    assert [(s.metric.name, s.value, s.labels) for s in found] == [
        ("opsd_incident_gpu_seconds", 2 * first.cost.gpu_seconds, ("gpu_throttle", "3")),
        ("opsd_incident_brief_info", 1.0, ("gpu_throttle", "3", "hot", told.acts, told.command, "n17")),
    ]
    many = [replace(first, id=f"{n}", severity=Severity.INFO) for n in range(99)]
    grave = replace(first, id="grave", severity=Severity.CRITICAL)
    briefs = [s for s in brief_samples([*many, grave], lambda _kind: "act", "n") if s.metric.name.endswith("_info")]
    assert len(briefs) == 32 and briefs[0].labels[2] == "grave"


def test_a_command_in_a_label_is_whole_or_another_one() -> None:
    """A long one is not cut: it would do something else."""
    hostile = incident("a b", kind="gpu_lost", summary="'" * 200, culprit=Culprit("gpu", "node-17", 3))
    (sample,) = (s for s in brief_samples([hostile], lambda _kind: "observe", "n") if s.metric.name.endswith("_info"))
    assert sample.labels[4] == "opsd incidents show 'a b'"


# The knowledge base: like incidents are found, and how they went is told as it was.


def xid(id: str, code: int, gpu: int = 0, **changes: object):
    """An ended incident about an Xid."""
    fields = {"kind": "gpu_xid", "summary": f"GPU {gpu} (00000000:1A:00.0): Xid {code}", "resolved_at": WALL + 60}
    return incident(id, culprit=Culprit("gpu", "n01", gpu, detail=f"Xid {code}"), **{**fields, **changes})


def test_the_same_xid_is_nearer_than_another_one_and_that_nearer_than_another_kind() -> None:
    """Kind, then reason, then place."""
    past = [
        incident("other", resolved_at=WALL),
        xid("another code", 48),
        xid("same code elsewhere", 79, 3),
        xid("same", 79),
    ]
    found = nearest(xid("now", 79, resolved_at=None), past)
    assert [similar.incident.id for similar in found] == ["same", "same code elsewhere", "another code"]
    assert found[0].similarity == 1


def test_a_past_incident_says_what_was_done_and_whether_it_helped() -> None:
    """An attempt that ended in escalation has not helped; without an attempt nothing is known."""
    past = [
        xid("a", 79, state=State.RESOLVED, attempts=1, opened_at=WALL - 1),
        xid("b", 79, state=State.ESCALATED, attempts=2, opened_at=WALL - 2),
        xid("c", 79, state=State.RESOLVED, opened_at=WALL - 3, actions=()),
    ]
    told = [(similar.done, similar.helped) for similar in nearest(xid("now", 79), past)]
    assert told == [(("kill_process",), True), (("kill_process",), False), ((), None)]


def test_incidents_that_are_not_over_teach_nothing() -> None:
    """Nobody knows yet whether what is done about them helps."""
    assert nearest(xid("now", 79), [xid("also now", 79, resolved_at=None), xid("now", 79)]) == []


def test_exceptions_and_signals_are_reasons_and_numbers_are_not() -> None:
    """The step at which a rank crashed says nothing about the next crash, the exception does."""
    crash = incident(
        kind="rank_crash",
        summary="rank 3 ended after step 812",
        evidence=(
            Evidence("torch.OutOfMemoryError: CUDA out of memory", "launcher", WALL),
            Evidence("signal SIGABRT", "", WALL),
        ),
    )
    features = signature(crash)
    assert {"exception OutOfMemoryError", "signal SIGABRT"} <= features.keys()
    assert not any("812" in feature for feature in features)


features = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 3), max_size=6)


@given(features, features)
def test_similarity_is_symmetric_and_between_nothing_and_the_same(one: dict[str, float], other: dict[str, float]):
    """1 for itself, the same both ways, 0 without anything in common."""
    assert similarity(one, other) == similarity(other, one)
    assert 0 <= similarity(one, other) <= 1
    assert similarity(one, one) == (1 if one else 0)
    assert (similarity(one, other) > 0) == bool(one.keys() & other.keys())


def test_statistics_count_each_kind_and_leave_symptoms_out() -> None:
    """Medians over what is known, shares over what is over."""
    evidence = (Evidence("x", "y", WALL - 4),)
    group = [
        xid("a", 79, state=State.RESOLVED, evidence=evidence, resolved_at=WALL + 10),
        xid("b", 79, state=State.RESOLVED, attempts=1, evidence=evidence, resolved_at=WALL + 30),
        xid("c", 79, state=State.ESCALATED, attempts=2, evidence=evidence, resolved_at=WALL + 50),
        xid("d", 79, state=State.RESOLVED, evidence=evidence, resolved_at=WALL + 50),
        xid("e", 79, resolved_at=None, evidence=()),
    ]
    symptom = replace(group[0], id="f", kind="rank_crash", cause="a")
    (record,) = statistics([*group, symptom])
    assert (record.kind, record.count, record.detect_s, record.resolve_s) == ("gpu_xid", 5, 4, 40)
    assert (record.by_itself, record.by_action, record.escalated) == (0.5, 0.25, 0.25)


def test_without_anything_over_there_are_no_medians() -> None:
    """Unknown is not zero."""
    (record,) = statistics([xid("a", 79, resolved_at=None, evidence=())])
    assert (record.detect_s, record.resolve_s, record.by_itself) == (None, None, 0)


# The diagnosis goes through hang, data, network, kernels in this order, and says the numbers.


NOW = 1000.0

USUAL = {"data": 0.02, "forward": 0.3, "backward": 0.5, "collective": 0.05}


def trained(number: int, **now: float) -> RankFact:
    """A rank whose last 20 of 40 steps have the phases ``now`` beside the usual ones."""
    phases = {**USUAL, **now}
    recent = steps(20, until=NOW, **phases)
    earlier = steps(20, until=NOW - 20 * sum(phases.values()), **USUAL)
    later = tuple(replace(step, step=step.step + 20) for step in recent)
    return rank(number, steps=(*earlier, *later), steps_reported=40, changed=NOW, phase_since=NOW)


def diagnosed(*ranks: RankFact, now: float = NOW) -> Diagnosis:
    (diagnosis,) = diagnose(ranks, "n01", now)
    return diagnosis


def answers(diagnosis: Diagnosis) -> dict[str, bool | None]:
    return {finding.question: finding.suspect for finding in diagnosis.findings}


def test_a_steady_run_has_no_suspect() -> None:
    """All questions are answered with no, each with the numbers of every rank."""
    diagnosis = diagnosed(trained(0), trained(1))
    assert list(answers(diagnosis).values()) == [False] * 5
    assert "neither data, network nor kernels" in diagnosis.conclusion
    assert "rank 0: 0.020 s of a step of 0.870 s (2%), 0.020 s before" in diagnosis.findings[2].facts


def test_data_comes_first() -> None:
    """The others wait for the rank that waits for its data, so that their collectives grow as well."""
    diagnosis = diagnosed(trained(0, data=0.4), trained(1, collective=0.43))
    assert answers(diagnosis)["is it data loading?"] is True
    assert diagnosis.conclusion == "it trains slower than before; most of what it loses is in data loading"


def test_the_network_is_to_blame_if_all_wait_in_collectives() -> None:
    """One rank that does not wait there would be the one that the others wait for."""
    assert "in network" in diagnosed(trained(0, collective=0.4), trained(1, collective=0.4)).conclusion


def test_a_slow_rank_is_found_among_the_kernels() -> None:
    """Its peers spend the time waiting for it in collectives, and the network is not blamed for that."""
    diagnosis = diagnosed(trained(0, backward=0.8), trained(1, collective=0.35), trained(2, collective=0.35))
    assert (answers(diagnosis)["is it network?"], answers(diagnosis)["is it kernels?"]) == (False, True)
    assert any("rank 0 computes" in fact for fact in diagnosis.findings[-1].facts)


def test_a_run_that_always_waits_for_data_is_told_so() -> None:
    """Nothing has grown, and yet a third of the step is worth knowing about."""
    always = steps(40, until=NOW, data=0.4, forward=0.8)
    diagnosis = diagnosed(rank(0, steps=always, steps_reported=40, changed=NOW))
    assert diagnosis.conclusion == "it trains as fast as before; 33% of each step is spent in data loading"


def test_a_hang_comes_before_everything_else() -> None:
    """The stopped rank is named, and speed is no question."""
    ranks = [replace(trained(0), phase="collective"), replace(trained(1), process="T", changed=NOW - 1)]
    diagnosis = diagnosed(*ranks, now=NOW + 60)
    assert answers(diagnosis) == {"does it hang?": True}
    assert "rank 1 holds it up, its process is stopped by a signal" in diagnosis.conclusion


def test_too_few_steps_are_not_judged() -> None:
    """Unknown is its own answer."""
    diagnosis = diagnosed(rank(0, steps=steps(3, until=NOW, forward=1.0), changed=NOW))
    assert "too early to tell" in diagnosis.conclusion


def test_ranks_survive_the_api() -> None:
    """What the agent sends is diagnosed like the pages themselves, a loss of NaN included."""
    nan = tuple(replace(step, loss=float("nan")) for step in trained(0).steps)
    ranks = (replace(trained(0), steps=nan, workers=((7, "data"),), worker_process=("S",)), trained(1, data=0.4))
    answer = json.loads(api.ranks(Snapshot(1, NOW, 0.0, ranks=ranks)))
    received = [to_rank(document) for document in answer["ranks"]]
    assert (received[1], received[0].workers) == (ranks[1], ((7, "data"),))
    assert diagnose(received, "n01", answer["at"]) == diagnose(ranks, "n01", NOW)


def test_a_run_that_an_incident_slows_is_not_said_to_be_fast() -> None:
    """The figure is that of the incident; the last steps are compared with steps that it has slowed as well."""
    slow = Cost(0.12, 60.0, "job 4242 loses 12% (4 GPUs, measured)", gpus=4)
    found = api.incident_list(Snapshot(1, NOW, 0.0, incidents=(incident(run="smol", cost=slow, job=""),)), node="n01")
    said = [*_lines(diagnosed(trained(0)), found["incidents"])]
    assert any("job 4242 loses 12% (4 GPUs, measured); 60 GPU-seconds so far" in line for line in said)
    assert "as fast as before in its last steps, which the incident slows as well" in said[-1]
    assert "in its last steps" not in [*_lines(diagnosed(trained(0)), ())][-1]


def test_only_the_job_that_was_asked_for_is_sent() -> None:
    """A job is named by its id or its run."""
    ranks = (trained(0), replace(trained(1), run="other", job="7"))
    snapshot = Snapshot(1, NOW, 0.0, ranks=ranks)
    named = {job: [r["run"] for r in json.loads(api.ranks(snapshot, job))["ranks"]] for job in ("", "7", "smol", "9")}
    assert named == {"": ["smol", "other"], "7": ["other"], "smol": ["smol"], "9": []}


def test_without_agent_and_run_the_command_says_so(tmp_path) -> None:
    """One sentence and exit code 1; the rank pages are looked for where the configuration says."""
    config = tmp_path / "opsd.toml"
    config.write_text(f"[agent]\nlisten = '127.0.0.1:1'\nnode = 'n01'\n[ranks]\nroot = '{tmp_path / 'shm'}'\n")
    result = CliRunner().invoke(cli, ["diagnose", "--job", "4242", "--config", str(config)])
    assert (result.exit_code, result.output) == (
        exitcodes.FAILED,
        "opsd: no run or job 4242 trains on n01; `opsd status` shows what does\n",
    )


def test_a_diagnosis_is_json_able() -> None:
    """For scripts."""
    assert json.loads(json.dumps(asdict(diagnosed(trained(0)))))["run"] == "smol"
