"""job.log: what a person reads of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opsd.launch.io.run_log import JOB_LOG, EventText, JobLog, RunLog

STARTED = {"event": "generation_started", "generation": 1, "world_size": 2, "nodes": ["n1", "n2"], "spares": ["n3"]}
LOST = {"event": "node_lost", "lost": "n2", "silent_s": 2.13, "ranks": True}
AGAIN = {**STARTED, "generation": 2, "nodes": ["n1", "n3"], "spares": []}
RESUMED = {"event": "resumed", "generation": 2, "step": 121, "previous_step": 123, "lost_steps": 3, "recovered_s": 3.62}


def told(*events: dict[str, Any]) -> list[str]:
    """The lines without their time."""
    job_log = EventText()
    return [line.split(" ", 2)[2] for event in events if (line := job_log.line({"t": 0.0, "node": "n1", **event}))]


def test_a_loss_reads_as_one_text() -> None:
    """What died, who took its place, from which step, and how many steps are done again."""
    assert told(STARTED, LOST, AGAIN, RESUMED) == [
        "generation 1 runs on n1, n2; n3 stands by",
        "n2 is lost with its ranks: silent for 2.1 s",
        "generation 2 runs on n1, n3: n3 in the place of n2",
        "it goes on with step 121 after 3.6 s; 3 steps are done again",
    ]


def test_a_rank_that_fails_is_told_with_its_error_and_its_victims_are_not() -> None:
    """Only the culprit matters."""
    error = {"type": "ValueError", "message": "no\nsuch thing", "where": "train.py:3"}
    failed = {"event": "rank_exited", "rank": 5, "exit": "exit code 1", "step": 40, "culprit": True, "error": error}
    assert told(failed, {**failed, "rank": 6, "culprit": False}) == [
        "rank 5 on n1 failed after step 40: ValueError: no such thing"
    ]


def test_what_is_of_no_interest_to_a_person_is_no_line() -> None:
    """Checkpoints of every few minutes, for instance."""
    assert told({"event": "checkpoint_committed", "step": 20}, {"event": "data_mixture"}, {}) == []


@pytest.mark.parametrize("event", [{"event": "node_lost"}, {"event": "resumed", "recovered_s": "?"}, LOST | {"t": "x"}])
def test_an_event_of_another_release_is_still_a_line(event: dict[str, Any]) -> None:
    """Fields may be missing or unlike."""
    assert len(EventText().line(event).splitlines()) == 1


def test_the_leader_writes_the_log_beside_the_events(tmp_path: Path) -> None:
    """One that takes over goes on with it and tells nothing twice."""
    first = RunLog("r", "n1", tmp_path / "events.jsonl")
    first.emit("generation_started", nodes=["n1", "n2"], spares=[])
    second = RunLog("r", "n2", tmp_path / "events.jsonl")
    second.emit("generation_started", nodes=["n2"], spares=[])
    lines = (tmp_path / JOB_LOG).read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "generation 0 runs on n1, n2", "generation 0 runs on n2, without n1",
    ]  # fmt: skip


def test_the_jobs_own_output_gets_the_log_once_its_batch_script_is_dead(tmp_path: Path) -> None:
    """Before that the batch script copies it there."""
    output = tmp_path / "train-7.log"
    output.touch()
    environ = {"OPSD_BATCH_HOST": "n2", "OPSD_JOB_OUTPUT": f"{output.stat().st_ino}:{output}"}
    log = JobLog(tmp_path, environ)
    for event in (STARTED, LOST, AGAIN):
        log.tell({"t": 0.0, **event})
    assert [line.split()[0] for line in output.read_text().splitlines()] == ["opsd:", "opsd:"]
    assert len((tmp_path / JOB_LOG).read_text().splitlines()) == 3


@pytest.mark.parametrize("told", ["", "1:", ":/x", "12:{path}", "x:{path}"])
def test_an_output_that_is_not_shared_is_left_alone(tmp_path: Path, told: str) -> None:
    """Another file of that name on this node is not the job's."""
    output = tmp_path / "train-7.log"
    output.touch()
    log = JobLog(tmp_path, {"OPSD_BATCH_HOST": "n2", "OPSD_JOB_OUTPUT": told.format(path=output)})
    log.tell({"t": 0.0, **LOST})
    assert output.read_text() == ""
    assert (tmp_path / JOB_LOG).exists()


def test_a_batch_host_that_an_earlier_start_has_lost_is_not_lost(tmp_path: Path) -> None:
    """It runs the batch script of this start, which copies the log itself."""
    output = tmp_path / "train-7.log"
    output.touch()
    log = JobLog(tmp_path, {"OPSD_BATCH_HOST": "n2", "OPSD_JOB_OUTPUT": f"{output.stat().st_ino}:{output}"})
    log.remember(LOST)
    for event in (STARTED, RESUMED):
        log.tell({"t": 0.0, **event})
    assert output.read_text() == ""
