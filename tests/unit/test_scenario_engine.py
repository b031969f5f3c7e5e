"""The scenario engine itself: a player that finds every scenario right would prove nothing."""

import random

import pytest

from opsd.collectors import NAMES
from opsd.collectors.base import NoData, Reading
from opsd.scenarios.healthy import Signal
from opsd.scenarios.model import Change, Course, Scenario, ScenarioError
from opsd.scenarios.node import COLLECTORS, SimulatedNode
from opsd.scenarios.player import judge, play

THROTTLE = {
    "title": "GPU 2 is throttled",
    "duration": 30,
    "at": [{"t": 10, "gpu": 2, "set": {"opsd_gpu_throttle_seconds_total{reason=sw_thermal}": {"rate": 1.0}}}],
}
RIGHT = {
    "kind": "gpu_throttle",
    "culprit": {"gpu": 2, "rank": 2},
    "severity": "critical",
    "within": 10,
    "actions": ["set_power_limit", "notify"],
    "state": {"act": "verifying"},
    "evidence": ["sw_thermal"],
}


def verdict(*expected, **changes):
    """The verdict on the throttle in mode act with these expectations."""
    scenario = Scenario.model_validate({**THROTTLE, **changes, "expect": list(expected)})
    return judge(scenario, play(scenario, "act"))


def test_a_scenario_that_goes_as_expected_has_no_problems():
    """The baseline of the tests below."""
    found = verdict(RIGHT)
    assert found.problems == ()
    assert [(hit.kind, hit.culprit_right) for hit in found.hits] == [("gpu_throttle", True)]
    assert 0 < found.hits[0].latency_s <= 10


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"culprit": {"gpu": 1}}, "blames"),
        ({"severity": "warning"}, "is critical, expected warning"),
        ({"within": 1}, "s after the fault, expected within 1 s"),
        ({"at": 20}, "s after the fault"),
        ({"actions": ["notify"]}, "was answered with"),
        ({"state": {"act": "resolved"}}, "ends verifying"),
        ({"evidence": ["a failing fan"]}, "does not say 'a failing fan'"),
    ],
)
def test_every_wrong_expectation_is_a_problem(wrong, said):
    """Culprit, severity, time, actions, state and evidence are each compared."""
    assert any(said in problem for problem in verdict({**RIGHT, **wrong}).problems)


def test_an_incident_that_nobody_expects_is_a_false_alarm():
    """A scenario without expectations is a healthy one."""
    found = verdict()
    assert found.false_alarms == ("gpu_throttle",)
    assert "false alarm" in found.problems[0]


def test_a_symptom_may_be_allowed():
    """What is listed as allowed is neither expected nor a false alarm."""
    assert verdict(allow=["gpu_throttle"]).problems == ()


def test_an_incident_that_does_not_open_is_missed():
    """The detector must not be silent."""
    found = verdict(RIGHT, {**RIGHT, "kind": "gpu_lost"})
    assert found.missed == ("gpu_lost",)


def test_the_same_scenario_plays_the_same_way_twice():
    """Noise comes from the scenario's own seed, and time from nowhere else."""
    scenario = Scenario.model_validate({**THROTTLE, "expect": [RIGHT]})
    first, second = play(scenario, "act"), play(scenario, "act")
    assert list(first.incidents.values()) == list(second.incidents.values())


def test_every_registered_collector_is_simulated():
    """A new one needs no line here; without a series it has no data, as on a node that lacks its source."""
    assert tuple(COLLECTORS) == NAMES
    node = SimulatedNode(Scenario(title="one thermal zone is read"))
    assert isinstance(node.read("thermal"), NoData)
    node.apply(Change(set={"opsd_thermal_zone_celsius{zone=thermal_zone0,type=acpitz}": 40.0}))
    reading = node.read("thermal")
    assert isinstance(reading, Reading)
    assert [(sample.value, sample.labels) for sample in reading.samples] == [(40.0, ("thermal_zone0", "acpitz"))]


def test_an_unknown_collector_is_refused():
    """A slip of the pen would make a scenario of a blind collector one of a seeing one."""
    with pytest.raises(ScenarioError, match="therml: no such collector"):
        SimulatedNode(Scenario(title="a slip")).apply(Change(blind=("therml",)))


def test_a_signal_follows_its_course():
    """Ramps end at their target, rates go on, additions happen once, and what is absent has no value."""
    signal, dice = Signal(10.0), random.Random(1)
    signal.become(Course(to=20, over=10), 0.0)
    assert [signal.read(second, dice) for second in (0, 5, 10, 60)] == [10, 15, 20, 20]
    signal.become(Course(add=3), 60.0)
    assert signal.read(70, dice) == 23
    signal.become(Course(rate=-2), 70.0)
    assert signal.read(75, dice) == 13
    signal.become("absent", 75.0)
    assert signal.read(80, dice) is None
    signal.become(4.0, 80.0)
    assert signal.read(99, dice) == 4.0
