"""Deadlines: a command or a pyslurm that does not answer is given up in time, with everything it has started."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from opsd.slurm.commands import CommandSlurm
from opsd.slurm.connect import PyslurmSlurm, Worker, why_not_pyslurm
from opsd.slurm.port import Node, SlurmMissing, SlurmUnavailable
from opsd.slurm.pyslurm_worker import serve
from opsd.slurm.runner import Output, clean_environment, run_command

GENEROUS_S = 30.0


def wait_gone(pid: int) -> bool:
    """True once the process is gone or a zombie."""
    deadline = time.monotonic() + GENEROUS_S
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_a_command_returns_what_it_wrote() -> None:
    """Exit code, both outputs and standard input pass through."""
    program = "import sys; print(sys.stdin.read().upper()); print('aside', file=sys.stderr); sys.exit(3)"
    output = run_command([sys.executable, "-c", program], GENEROUS_S, "script")
    assert output == (3, "SCRIPT\n", "aside\n")


def test_a_command_that_hangs_is_given_up_with_its_children(tmp_path: Path) -> None:
    """A wrapper script whose child holds the output open must not hold the caller."""
    note = tmp_path / "pid"
    program = f"sleep 1000 & echo $! > {note}; wait"
    began = time.monotonic()
    with pytest.raises(SlurmUnavailable, match="has not answered within 2 s"):
        run_command(["sh", "-c", program], 2.0)
    assert time.monotonic() - began < GENEROUS_S
    assert wait_gone(int(note.read_text()))


def test_a_missing_command_says_what_to_install() -> None:
    """Slurm that is not installed is an answer of its own."""
    with pytest.raises(SlurmMissing, match=r"sinfo-of-nowhere cannot be run .*install"):
        run_command(["sinfo-of-nowhere"], GENEROUS_S)


def test_the_environment_of_a_job_does_not_leak_into_commands() -> None:
    """Formats, clusters and job ids in the environment would change what Slurm's commands do."""
    env = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/x/slurm.conf",
        "SLURM_JOB_ID": "7",
        "SQUEUE_FORMAT": "%i",
        "SBATCH_PARTITION": "dev",
        "SINFO_FORMAT": "%n",
        "SACCT_FORMAT": "JobID",
    }
    assert clean_environment(env) == {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/x/slurm.conf",
        "SLURM_TIME_FORMAT": "%s",
        "LC_ALL": "C",
    }


def worker(program: str, deadline_s: float = GENEROUS_S) -> Worker:
    """A worker that is ``program`` instead of pyslurm."""
    return Worker((sys.executable, "-c", program), deadline_s=deadline_s)


SLURM = CommandSlurm(lambda argv, deadline_s, stdin="": Output(0, "slurm 25.11.7\n", ""))
ECHO = "import sys\nfor line in sys.stdin:\n    print('{\"ok\": ' + line.strip() + '}', flush=True)"


def test_one_worker_answers_many_requests() -> None:
    """The process is started once, not for every call."""
    ask = worker(ECHO)
    try:
        assert ask("nodes", ["n1"]) == ["nodes", ["n1"]]
        assert ask("jobs", [], "n1") == ["jobs", [], "n1"]
    finally:
        ask.close()


def test_a_worker_that_hangs_is_replaced() -> None:
    """After the deadline the process is killed, and the next call gets a new one."""
    ask = worker("import time; time.sleep(1000)", 0.3)
    for _ in range(2):
        with pytest.raises(SlurmUnavailable, match=r"has not answered within 0\.3 s"):
            ask("nodes", [])
    ask.close()


def test_a_library_that_exits_is_told_apart() -> None:
    """Importing pyslurm where Slurm is not configured exits: its last words become the sentence."""
    ask = worker("import sys; print('fatal: no configuration source', file=sys.stderr); sys.exit(1)")
    assert why_not_pyslurm(ask, SLURM) == "pyslurm cannot be used here: fatal: no configuration source"
    ask.close()


def test_pyslurm_that_is_not_installed_is_told_apart() -> None:
    """The real worker says so without taking this process down."""
    ask = worker("import sys; sys.modules['pyslurm'] = None\nfrom opsd.slurm.pyslurm_worker import main; main()")
    assert "pyslurm" in why_not_pyslurm(ask, SLURM)
    ask.close()


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        ("25.11.2", ""),
        ("22.5.1", "pyslurm 22.5.1 does not fit Slurm 25.11.7; install pyslurm 25.11"),
        ("?", "pyslurm ? does not fit Slurm 25.11.7; install pyslurm 25.11"),
    ],
)
def test_pyslurm_of_another_release_is_not_used(bound: str, why: str) -> None:
    """The controller would not understand it."""
    ask = worker(f'input(); print(\'{{"ok": "{bound}"}}\', flush=True)')
    assert why_not_pyslurm(ask, SLURM) == why
    ask.close()


def test_errors_inside_the_worker_are_sentences_and_keep_it_alive() -> None:
    """Whatever pyslurm raises, the next request is answered."""

    def refuse() -> None:
        raise ValueError("Invalid user id")

    answers: list[str] = []
    serve({"refuse": refuse, "hello": lambda: "25.11"}, ['["refuse"]', '["hello"]', '["unknown"]'], answers.append)
    assert answers[:2] == ['{"error": "Invalid user id"}\n', '{"ok": "25.11"}\n']
    assert "error" in answers[2]


class Answers:
    """An asker with fixed answers; an answer that is an exception is raised."""

    def __init__(self, **answers: object) -> None:
        self._answers = answers
        self.asked: list[tuple[object, ...]] = []

    def __call__(self, name: str, *arguments: object) -> object:
        self.asked.append((name, *arguments))
        answer = self._answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_bindings_give_the_same_values_as_commands() -> None:
    """What comes as JSON from the worker becomes the port's values."""
    drained = {"name": "n1", "state": "idle", "flags": ["drain"]}
    told = {"reason": "opsd:1 x", "reason_by": "root", "reason_at": 7}
    slurm = PyslurmSlurm(Answers(nodes=[{**drained, **told}]))
    assert slurm.nodes(["n1"]) == [Node("n1", "idle", frozenset({"drain"}), "opsd:1 x", "root", 7)]


def test_bindings_that_time_out_do_not_respond() -> None:
    """A controller that never answers the ping is down, not an error."""
    assert not PyslurmSlurm(Answers(responds=SlurmUnavailable("late"))).responds()


def test_commands_in_a_machine_without_slurm(tmp_path: Path) -> None:
    """The whole port answers with SlurmMissing, ping included."""
    slurm = CommandSlurm(lambda argv, deadline_s, stdin="": run_command([str(tmp_path / argv[0])], deadline_s))
    for call in (slurm.responds, slurm.nodes, slurm.jobs, slurm.reservations, lambda: slurm.version):
        with pytest.raises(SlurmMissing):
            call()


def test_no_descriptors_are_left_behind() -> None:
    """Ten hanging calls leave as many open files as before."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        with pytest.raises(SlurmUnavailable):
            run_command(["sleep", "1000"], 0.01)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
