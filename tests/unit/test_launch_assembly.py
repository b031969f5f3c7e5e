"""What the leader does with the Slurm job at the end of a run."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.launch.io.addresses import host_is_up
from opsd.launch.io.reporting import flush
from opsd.launch.run.assembly import EnclosingJob
from opsd.launch.run.closing import summarize_job
from opsd.slurm.port import JobDetails, Node, SlurmUnavailable
from tests.fakes.requeue import FakeQueue, running

ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("lost", "calls"), [(("n2", "n9"), ["drain n2", "down n2", "requeue"]), (("n9",), []), ((), [])]
)
def test_a_spare_that_left_is_no_loss_of_the_job(tmp_path: Path, lost: tuple[str, ...], calls: list[str]) -> None:
    """It never was one of its nodes: the requeue is without the others, and the batch script's if there are none."""
    slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2", "n9")], running("n1", "n2"), dead=lost)
    EnclosingJob(ENVIRON, tmp_path / "log", lambda: slurm).end(exitcodes.REQUEUE, lost, ())
    assert slurm.calls == calls


def test_a_controller_that_is_away_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """The launcher says so, and nothing outside of a job; else the summary is in the comment of the job."""
    slurm = FakeQueue([], running("n1", "n2"))
    summarize_job("finished", lambda: slurm, ENVIRON)
    slurm.error = SlurmUnavailable("the controller does not answer")
    summarize_job("failed", lambda: slurm, ENVIRON)
    summarize_job("finished", lambda: slurm, {})
    assert slurm.summaries == {7: "finished"}
    assert capfd.readouterr().err == (
        "opsd: the job's comment has no summary of the run: the controller does not answer\n"
    )


@pytest.mark.parametrize(
    ("code", "refuses", "calls"),
    [
        (exitcodes.OK, "", ["complete 0"]),
        (exitcodes.REPEATED, "", ["complete 70"]),
        (exitcodes.OK, "complete", ["cancel 7"]),
    ],
)
def test_a_run_ends_its_job_with_its_own_code(tmp_path: Path, code: int, refuses: str, calls: list[str]) -> None:
    """The batch host is dead. A cancel breaks each chain of afterok, so it is the last resort."""
    slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2")], running("n1", "n2"), refuses=refuses)
    EnclosingJob(ENVIRON, tmp_path / "log", lambda: slurm).end(code, ("n1",), ())
    assert slurm.calls == calls


def test_a_job_that_slurm_may_not_requeue_ends_with_75(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No helper is submitted; nothing else would end the job, whose batch script is dead."""
    slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2")], running("n1", "n2"), room=True)
    slurm.by_details[7] = JobDetails({}, requeues=False)
    EnclosingJob(ENVIRON, tmp_path / "log", lambda: slurm).end(exitcodes.REQUEUE, ("n1",), ())
    assert (slurm.calls, slurm.submitted) == (["complete 75"], [])
    flush()
    assert "job 7 has --no-requeue" in capfd.readouterr().err


@pytest.mark.parametrize(("is_up", "calls"), [(True, []), (False, ["complete 0"])])
def test_a_batch_host_that_died_before_it_joined_is_no_loss_that_the_run_knows(
    tmp_path: Path, is_up: bool, calls: list[str]
) -> None:
    """It is asked whether it still lives: nobody else would end the job."""
    slurm = FakeQueue([Node(name, "idle") for name in ("n1", "n2")], running("n1", "n2"))
    environ = {**ENVIRON, "OPSD_BATCH_HOST": "n1"}
    asked = []

    def answers(host: str, ports: Sequence[int]) -> bool:
        asked.append((host, *ports))
        return is_up

    EnclosingJob(environ, tmp_path / "log", lambda: slurm, answers).end(exitcodes.OK, (), ())
    assert (slurm.calls, asked) == (calls, [("n1", 7003, 22)])


def test_a_host_that_refuses_is_up() -> None:
    """One that does not answer is not, and one without an address is unknown."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = server.getsockname()[1]
        assert host_is_up("127.0.0.1", (port,))
        for _ in range(4):  # a queue that is full takes no more
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        assert not host_is_up("127.0.0.1", (port,), timeout_s=0.2)
    assert host_is_up("127.0.0.1", (port,))
    assert host_is_up("nobody.invalid", (port,))
