"""The brief of an incident: what happened, what it costs, who acts, and a command that can be pasted."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.brief import PLACEHOLDER, brief, fill, values
from opsd.agent.metrics import brief_samples
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Acknowledgement, Cost, Culprit, Incident, Severity, State
from opsd.scenarios.model import load
from opsd.scenarios.player import play
from tests.fakes.incidents import WALL, incident

LIMIT = {"verb": "set_power_limit", "target": "GPU-1", "args": {"gpu": 3, "watts": 595, "restore_watts": 700}}


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
        ("act", {"state": State.VERIFYING}, "opsd has acted", "opsd incidents show gpu_throttle-1"),
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
