"""Every timeline in this folder, played through the agent's own loop in its policy modes."""

from pathlib import Path

import pytest

from opsd.runbooks import RUNBOOKS
from opsd.scenarios.model import ScenarioError, files, load
from opsd.scenarios.player import judge, play
from tests.fakes.metamorphic import mode_of

FOLDER = Path(__file__).parent
FILES = list(files(FOLDER))


OTHER_MODES = [
    path if number % 5 == 0 else pytest.param(path, marks=pytest.mark.long) for number, path in enumerate(FILES)
]
"""Timelines that are played in the other modes too, most of them in ``make test-long`` only."""


def _named(path):
    return f"{path.parent.name}/{path.stem}"


def _problems(scenario, modes):
    return [problem for mode in modes for problem in judge(scenario, play(scenario, mode)).problems]


@pytest.mark.parametrize("path", FILES, ids=_named)
def test_the_agent_finds_what_is_expected_and_nothing_else(path):
    """Kind, culprit, severity, latency, actions and final state are right. There is no false alarm.

    The mode is the one in which opsd does most.
    """
    scenario = load(path)
    assert _problems(scenario, [mode_of(scenario)]) == []


@pytest.mark.parametrize("path", OTHER_MODES, ids=_named)
def test_the_agent_finds_the_same_in_the_other_modes(path):
    """And its actions are those of each mode."""
    scenario = load(path)
    assert _problems(scenario, {*scenario.played_in} - {mode_of(scenario)}) == []


@pytest.mark.parametrize("kind", [runbook.kind for runbook in RUNBOOKS])
def test_every_kind_has_scenarios_for_it_and_against_it(kind):
    """A runbook is shown at least five times what it must find and three times what it must leave alone."""
    scenarios = [load(path) for path in FILES if path.parent.name == kind]
    finds = [any(wanted.kind == kind for wanted in scenario.expect) for scenario in scenarios]
    assert finds.count(True) >= 5
    assert finds.count(False) >= 3


def test_a_scenario_with_an_unknown_key_is_refused_with_its_place(tmp_path):
    """A slip of the pen in a scenario must not turn it into one that expects nothing."""
    path = tmp_path / "slip.toml"
    path.write_text('title = "a slip"\n[[at]]\nt = 3\nrank = 2\n')
    with pytest.raises(ScenarioError, match=r"slip\.toml: at\.0\.rank"):
        load(path)


def test_a_series_that_no_collector_exports_is_refused(tmp_path):
    """Scenarios can only show the agent what its collectors can deliver."""
    path = tmp_path / "made_up.toml"
    path.write_text('title = "made up"\nduration = 2\n[[at]]\nt = 1\ngpu = 0\nset.opsd_gpu_mood = 3\n')
    with pytest.raises(ScenarioError, match="no collector exports"):
        play(load(path), "observe")
