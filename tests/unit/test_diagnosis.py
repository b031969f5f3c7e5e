"""The diagnosis goes through hang, data, network, kernels in this order, and says the numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from click.testing import CliRunner

from opsd import exitcodes
from opsd.agent.diagnosis import Diagnosis, diagnose, to_rank
from opsd.agent.loop import Snapshot
from opsd.agent.web import api
from opsd.collectors.base import RankFact
from opsd.commands.diagnose import _lines
from opsd.commands.main import cli
from opsd.runbooks.base import Cost
from tests.fakes.facts import rank, steps
from tests.fakes.incidents import incident

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
