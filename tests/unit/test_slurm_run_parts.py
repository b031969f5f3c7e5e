"""The parts of ``opsd slurm run``: names, steps, and when a run is over."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opsd import exitcodes
from opsd.checkpoints.claims import Claim
from opsd.commands.main import cli
from opsd.commands.slurm_run import run_name
from opsd.rundir import RUN_NAME
from opsd.slurm.batch import Steps, srun, step_environment
from opsd.slurm.run_outcome import (
    LEASE_TIMEOUT_S,
    PROGRESS_S,
    BadStarts,
    Observation,
    RunEvents,
    RunOutcome,
    outcome_of,
)

START = "train, job 7.0"
NODES = frozenset({"n1", "n2", "n3"})


def ended(code: int, start: str = START, **more: object) -> Claim:
    """The last claim of a run."""
    return Claim(4, start, "n1.1", plan={"end": {"code": code, "reason": "said so", **more}})


RUNS = Claim(3, START, "n1.1")


def gone(claim: Claim | None, gone_s: float = 60.0, lease_age_s: float = float("inf"), **codes: int) -> Observation:
    """No step is left, and srun said this of them."""
    return Observation(claim, frozenset(), codes, gone_s, lease_age_s)


@pytest.mark.parametrize("name", ["train", "llama-70b_v2.1", "job.sbatch"])
def test_a_job_name_that_may_name_a_run_does(name: str) -> None:
    """Nothing is added to it."""
    assert run_name({"SLURM_JOB_NAME": name}) == name


@pytest.mark.parametrize("name", ["mein großer Lauf", "über", "日本語", "-x", "", "a/b", "x" * 200, "a b\n"])
def test_any_job_name_becomes_one_that_may(name: str) -> None:
    """Blanks, umlauts, and names that are too long are replaced."""
    assert RUN_NAME.fullmatch(run_name({"SLURM_JOB_NAME": name}))


def test_names_that_differ_in_what_is_replaced_stay_apart() -> None:
    """Two jobs never share a run by accident."""
    names = ["a b", "a-b", "a_b", "ä b", "a/b", "x" * 200, "x" * 201]
    assert len({run_name({"SLURM_JOB_NAME": name}) for name in names}) == len(names)


def test_each_task_of_an_array_has_a_run_of_its_own() -> None:
    """The tasks of an array have the same name, which may be too long for a number behind it."""
    assert run_name({"SLURM_JOB_NAME": "sweep", "SLURM_ARRAY_TASK_ID": "7"}) == "sweep-7"
    tasks = {run_name({"SLURM_JOB_NAME": "x" * 80, "SLURM_ARRAY_TASK_ID": str(task)}) for task in range(100)}
    assert len(tasks) == 100


def test_a_step_is_one_task_on_one_node_and_outlives_the_others() -> None:
    """With --no-kill, which the step needs as well as the job."""
    argv = srun("n2", {"gpu:h100": 4, "gpu:1g": 2, "nic": 1}, ["opsd", "launch"])
    assert argv[-2:] == ["opsd", "launch"]
    assert {"--no-kill", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--overlap"} <= set(argv)
    assert {"--export=ALL", "--gpus=h100:4,1g:2", "--gres=nic:1", "--mem=0"} <= set(argv)
    assert not [option for option in srun("n2", {"shard": 1}, []) if option.startswith(("--gpus", "--gres"))]
    assert "--gpus=3" in srun("n2", {"gpu": 3}, [])
    assert not [option for option in argv if "cpus" in option]  # 22.05 gives none to a step that asks for all


def test_a_step_asks_for_nothing_that_the_whole_job_has_asked_for() -> None:
    """Of the variables that sbatch sets those remain that say what the job is and where it runs."""
    names = (
        "SLURM_JOB_ID", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID",
        "SLURM_CONF", "SLURM_NODE_ALIASES", "SLURM_CPU_BIND", "HOME",
    )  # fmt: skip
    kept = dict.fromkeys(names, "1")
    dropped = (
        "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_GPU_BIND",
        "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_TASKS_PER_NODE",
        "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE", "SLURM_TRES_PER_TASK", "SLURM_STEP_GRES", "SLURM_EXCLUSIVE", "SLURM_HINT",
    )  # fmt: skip
    assert step_environment({**kept, **dict.fromkeys(dropped, "2")}) == kept


def test_the_run_ends_as_it_says_whatever_srun_says() -> None:
    """Also while steps are left: that of a dead node may seem to go on for minutes."""
    look = Observation(ended(70, lost=["n2"], unfit=["n3"]), NODES, {})
    assert outcome_of(look, START) == RunOutcome(70, "said so", True, ("n2",), ("n3",))


def test_what_an_earlier_start_has_said_is_not_the_end_of_this_one() -> None:
    """The job was requeued after that."""
    assert outcome_of(Observation(ended(75, "train, job 7.1"), NODES, {}), "train, job 7.2") is None


def test_the_start_of_a_run_on_one_node_names_its_launcher_too() -> None:
    """Another start of the job is still another one."""
    claim = ended(0, "train, job 7.1, n1-4711-ab")
    assert outcome_of(Observation(claim, NODES, {}), "train, job 7.1") is not None
    assert outcome_of(Observation(claim, NODES, {}), "train, job 7.10") is None
    assert outcome_of(Observation(ended(0, "train, job 7.10, n1-4711-ab"), NODES, {}), "train, job 7.1") is None


def test_a_step_that_ends_with_zero_is_no_end() -> None:
    """Slurm up to 22.05 says 0 of a step whose node has died."""
    assert outcome_of(Observation(RUNS, frozenset({"n1"}), {"n2": 0, "n3": 0}), START) is None
    found = outcome_of(gone(RUNS, n1=0, n2=0, n3=0), START)
    assert found is not None
    assert (found.code, found.reported) == (exitcodes.REQUEUE, False)


def test_borrowed_nodes_keep_the_job_alive() -> None:
    """All of the job's own nodes were replaced; somebody renews the lease."""
    assert outcome_of(gone(RUNS, lease_age_s=1.0, n1=0, n2=1), START) is None
    assert outcome_of(gone(RUNS, gone_s=1.0, n1=0, n2=1), START) is None
    assert outcome_of(gone(RUNS, lease_age_s=LEASE_TIMEOUT_S, n1=0, n2=1), START) is not None


def test_a_job_does_not_hold_its_nodes_while_another_copy_trains() -> None:
    """The lease is that copy's, which may take weeks; borrowed nodes of this one would make claims of this start."""
    younger = Claim(5, "train, job 8.0", "n8.1")
    assert outcome_of(gone(younger, lease_age_s=1.0, n1=76, n2=76), START) == RunOutcome(
        exitcodes.FENCED, "another copy of the run has begun", reported=False
    )
    assert outcome_of(gone(younger, gone_s=1.0, n1=76, n2=76), START) is None
    assert outcome_of(gone(RUNS, lease_age_s=1.0, n1=76, n2=0), START) is None


@pytest.mark.parametrize("code", [exitcodes.USAGE, exitcodes.NOT_FOUND, exitcodes.FENCED])
def test_what_another_start_would_not_mend_ends_the_job(code: int) -> None:
    """A wrong command line, no such program, another copy of the run."""
    found = outcome_of(gone(None, n1=code, n2=1), START)
    assert found is not None
    assert found.code == code


@pytest.mark.parametrize("code", [1, 233])
def test_launchers_that_all_fail_before_anything_began_end_the_job(code: int) -> None:
    """No claim of this start: they could not make the folder, reach each other, or be started."""
    found = outcome_of(gone(Claim(2, "train, job 6.0", "n1.1"), n1=code, n2=code), START)
    assert found is not None
    assert found.code == code


@pytest.mark.parametrize("code", [137, 138, 143])
def test_launchers_that_are_killed_before_anything_began_run_again(code: int) -> None:
    """By a signal to stop that came before they could hear it, or for want of memory."""
    found = outcome_of(gone(None, n1=code, n2=code), START)
    assert found is not None
    assert (found.code, found.reported) == (exitcodes.REQUEUE, False)


def test_a_run_that_began_and_ended_without_a_word_is_run_again() -> None:
    """Its launchers were killed, by the kernel for memory for instance."""
    found = outcome_of(gone(RUNS, n1=137, n2=137), START)
    assert found is not None
    assert (found.code, "n1 137" in found.reason) == (exitcodes.REQUEUE, True)


def test_starts_without_a_word_are_counted_while_nothing_is_gained(tmp_path: Path) -> None:
    """A step further, or a long time, and the count starts again."""
    counted = BadStarts(tmp_path / "wordless.json")
    assert [counted.note(step, 60.0) for step in (0, 0, 20, 20)] == [1, 2, 1, 2]
    assert counted.note(20, PROGRESS_S) == 1
    counted.forget()
    assert counted.note(20, 60.0) == 1


def test_the_files_of_the_run_tell_who_is_lost_and_how_far_it_came(tmp_path: Path) -> None:
    """From now on: what an earlier start has lost is nothing to this one."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "node_lost", "lost": "n9"}\n')
    events = RunEvents(tmp_path)
    lines = [
        {"event": "node_lost", "lost": "n2"}, {"event": "node_lost", "lost": "n3"},
        {"event": "launcher_joined", "joined": "n3"}, {"event": "checkpoint_committed", "step": 40},
    ]  # fmt: skip
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.write("no JSON\n")
    assert (events.lost, events.step) == (frozenset({"n2"}), 40)


def test_no_step_outlives_the_batch_script(tmp_path: Path) -> None:
    """Also where that is killed."""
    program = (
        "import sys, time; from opsd.slurm.batch import Steps; "
        "steps = Steps({'n1': ['sleep', '600']}, {'PATH': '/usr/bin:/bin'}); "
        "print(steps._running['n1'].pid, flush=True); time.sleep(600)"
    )
    batch = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert batch.stdout is not None
    pid = int(batch.stdout.readline())
    watched = os.pidfd_open(pid)
    batch.kill()
    batch.wait()
    assert select.select([watched], [], [], 10.0)[0], "srun lives on"
    os.close(watched)
    batch.stdout.close()


@pytest.mark.parametrize("what", ["end of a step", "signal"])
def test_a_pause_ends_with_a_step_or_a_signal(tmp_path: Path, what: str) -> None:
    """A node that another run waits for is not kept for the rest of the pause."""
    program = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from opsd.slurm.allocation import Allocation\n"
        "from opsd.slurm.batch import Batch, Steps\n"
        "batch = Batch(Path(sys.argv[1]), 'train, job 7.0', Allocation(7, ('n1',), 'n1', 0, '', ''), None)\n"
        "batch.listen()\n"
        "command = ['true'] if sys.argv[2] != 'signal' else ['sh', '-c', f'kill -USR1 {os.getpid()}; exec sleep 600']\n"
        "steps = Steps({'n1': command}, {'PATH': '/usr/bin:/bin'})\n"
        "batch.sleep(600)\n"
        "print(sorted(steps.codes), [each.name for each in batch.signals])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), what]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert said.stdout == ("[] ['SIGUSR1']\n" if what == "signal" else "['n1'] []\n"), said.stderr


def test_steps_are_ended_without_a_word(tmp_path: Path) -> None:
    """SIGTERM would have srun end its task."""
    steps = Steps({"n1": ["sleep", "600"], "n2": ["true"]}, {"PATH": "/usr/bin:/bin"})
    steps.abandon()
    assert steps.codes["n1"] == -signal.SIGKILL
    assert steps.left == frozenset()


def test_a_command_that_no_shell_would_take_is_a_wrong_command_line() -> None:
    """OPSD=/home/o'brien/opsd, which has to be quoted; an empty SLURM_STEP_ID is none."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_STEP_ID": "", "OPSD": "/home/o'brien/opsd"}
    done = CliRunner().invoke(cli, ["slurm", "run", "--dry-run", "--", "train.py"], env=job)
    assert (done.exit_code, "is no command of the shell" in done.output) == (exitcodes.USAGE, True), done.output


def test_options_of_the_program_stay_with_it() -> None:
    """Behind ``--`` nothing is read; without it the program could not be told from the value of an option."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "OPSD": "opsd"}
    given = ["train.py", "--run-id", "mine", "--wait", "3", "--help"]
    done = CliRunner().invoke(cli, ["slurm", "run", "--dry-run", "--", *given], env=job)
    assert done.exit_code == exitcodes.OK and done.output.rstrip().endswith(" ".join(given)), done.output
    refused = CliRunner().invoke(cli, ["slurm", "run", "--dry-run", *given[:-1]], env=job)
    assert (refused.exit_code, "write -- before the program" in refused.output) == (exitcodes.USAGE, True)


def test_who_is_notified_stands_on_no_command_line() -> None:
    """The launchers get it in their environment: other users of the nodes see what srun is called with."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "2", "SLURM_STEP_ID": ""}
    secret = "https://hooks.example.com/s3cret"
    done = CliRunner().invoke(cli, ["slurm", "run", "--dry-run", "--notify", secret, "--", "train.py"], env=job)
    assert done.exit_code == 0 and "opsd launch" in done.output and "s3cret" not in done.output


@pytest.mark.parametrize(
    ("nodes", "options", "told"),
    [
        ("n[1-5]", ("--nnodes=4", "--spares=1"), ("4", "1")),
        ("n[1-4]", ("--nnodes=4", "--spares=1"), ("4", "0")),
        ("n[1-4]", ("--nnodes=3:4", "--spares=2"), ("3:4", "1")),
        ("n[1-5]", ("--spares=1",), ("4", "1")),
    ],
)
def test_nodes_that_train_come_before_spares(
    nodes: str, options: tuple[str, ...], told: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A job of 4 to 5 nodes that was given 4 has no spare, and trains on 4 all the same."""
    done = dry_run(nodes, *options)
    words = done.stdout.splitlines()[0].split()
    assert (words[words.index("--nnodes") + 1], words[words.index("--spares") + 1]) == told
    assert ("spares stand by: the job has 4 nodes" in capfd.readouterr().err) == (nodes == "n[1-4]")


@pytest.mark.parametrize(
    ("option", "says"), [("--nnodes=5", "--nnodes 5 needs 5"), ("--spares=4", "--spares 4 needs 5")]
)
def test_a_job_that_is_too_small_is_refused(option: str, says: str) -> None:
    """With the option that asks for too much."""
    done = dry_run("n[1-4]", option)
    assert (done.exit_code, says in done.stderr) == (exitcodes.USAGE, True)


def dry_run(nodes: str, *options: str) -> Result:
    """What `opsd slurm run` would start in a job of these nodes."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_STEP_ID": ""}
    return CliRunner().invoke(cli, ["slurm", "run", "--dry-run", *options, "--", "train.py"], env=job)
