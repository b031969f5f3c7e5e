"""A user who fills the folder of runs: the runs of others are seen, and the agent stays within its means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.adversary.attacker import Attacker
from tests.adversary.attacks import invent_run, make_files, make_runs
from tests.adversary.node import Node
from tests.fakes.clock import eventually

FILES = 60_000


@pytest.fixture
def good(node: Node) -> Attacker:
    """Another user of the node, with a run that sorts behind all others."""
    user = Attacker(0)
    user.start(invent_run, str(node.shm), "zz-good")
    return user


def sees(node: Node) -> bool:
    return node.series("opsd_rank_up").get('rank="0",run="zz-good"') == 1.0


def state_of_ranks(node: Node) -> str:
    states = node.series("opsd_collector_state")
    return next((labels for labels, value in states.items() if 'collector="ranks"' in labels and value), "")


def test_living_runs_of_a_user_do_not_hide_those_of_another(node: Node, attacker: Attacker, good: Attacker) -> None:
    """Slots are shared among users; that the limit bites is a state, a metric and a line of the log."""
    attacker.start(make_runs, str(node.shm), 300, True)
    with node.agent() as process:
        assert eventually(lambda: sees(node) and 'state="limited"' in state_of_ranks(node))
        assert node.series("opsd_ranks_left_out")['what="runs"'] > 0
        assert len(node.series("opsd_run_up")) == 64
        process.terminate()
        assert "more than there is room for" in process.communicate(timeout=60)[1]
    good.close()


def test_finished_runs_give_way_to_living_ones(node: Node, attacker: Attacker) -> None:
    """Of one user, too: sixty-four folders of the past hide nothing."""
    attacker.start(make_runs, str(node.shm), 64, False)
    attacker.start(invent_run, str(node.shm), "zz-good")
    with node.agent():
        assert eventually(lambda: sees(node))
        assert eventually(lambda: 'state="ok"' in state_of_ranks(node))


def test_files_without_number_cost_little(node: Node, attacker: Attacker, good: Attacker) -> None:
    """Neither memory nor ticks, and others' runs are seen."""
    attacker.start(make_files, str(node.shm), FILES)
    with node.agent() as process:
        assert eventually(lambda: sees(node))
        began, used = node.ticks(), cpu_s(process.pid)
        assert eventually(lambda: node.ticks() >= began + 8)
        assert cpu_s(process.pid) - used < 0.17 * 8
        assert resident_bytes(process.pid) < 128 << 20
        assert len(node.series("opsd_rank_page_errors")) <= 2
    good.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
