"""Changes of a job that is a task of an array, whose last task has the array's number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import SlurmRejected
from opsd.slurm.runner import Output
from tests.fakes.slurm import SEPARATOR

ARRAY = {"8": "7_1", "9": "7_2", "7": "7_3"}
"""The tasks of a running array by number, as ``squeue --jobs=7`` of 22.05.8 lists them."""


def test_the_last_task_of_an_array_is_changed_alone() -> None:
    """Its number is that of the array: ``scancel 7`` would end all tasks, ``scontrol requeue 7`` stop them."""
    asked: list[str] = []

    def answer(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        if argv[0] != "squeue":
            asked.append(" ".join(argv))
            return Output(0, "JobId=7 ArrayJobId=7 ExcNodeList=(null)", "")
        about = "Comment" in argv[-1]
        tasks = (
            [number, f"of {number}", f"of {number}"] if about else [number, name] for number, name in ARRAY.items()
        )
        return Output(0, "".join(SEPARATOR.join([*task, "\n"]) for task in tasks), "")

    slurm = CommandSlurm(answer, separator=lambda: SEPARATOR)
    slurm.requeue(7)
    slurm.set_start_time(7)
    slurm.start_after(7, 12)
    slurm.summarize(7, "ended")
    slurm.exclude(7, ["n2"], 1.0)
    slurm.shrink(7, ["n1"])
    slurm.release(7)
    slurm.cancel(7)
    assert asked == [
        "scontrol requeue 7_3",
        "scontrol update jobid=7_3 starttime=now",
        "scontrol update jobid=7_3 dependency=afterany:12",
        "scontrol update jobid=7_3 admincomment=of 7 [opsd run: ended]",
        "scontrol show job 7_3 --oneliner",
        "scontrol update jobid=7_3 excnodelist=n2 comment=of 7 [opsd1 avoids n2@1]",
        "scontrol update jobid=7_3 nodelist=n1",
        "scontrol release 7_3",
        "scancel 7_3",
    ]


@pytest.mark.parametrize("names", [{}, {"7": "7"}, {"7": "7+0", "8": "7+1"}, {"7": "7_[1-3]"}])
def test_other_jobs_are_changed_by_their_number(names: Mapping[str, str]) -> None:
    """One that is gone, an ordinary one, a heterogeneous one, which is one job, and an array that waits as a whole."""
    asked: list[Sequence[str]] = []

    def answer(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        asked.append(argv)
        return Output(0, "".join(SEPARATOR.join([*record, "\n"]) for record in names.items()), "")

    CommandSlurm(answer, separator=lambda: SEPARATOR).cancel(7)
    assert asked[-1] == ("scancel", "7")


def test_a_task_that_slurm_has_forgotten_stands_for_no_others() -> None:
    """What is left under its number are other tasks of its array."""
    told = Output(0, SEPARATOR.join(["8", "7_1", "\n"]), "")
    slurm = CommandSlurm(lambda argv, deadline_s, stdin="": told, separator=lambda: SEPARATOR)
    with pytest.raises(SlurmRejected, match="forgotten job 7"):
        slurm.requeue(7)


def test_nothing_is_changed_while_the_name_of_a_job_is_not_known() -> None:
    """Its number might be that of an array."""

    def answer(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        assert argv[0] == "squeue"
        return Output(1, "", "squeue: error: something new")

    with pytest.raises(SlurmRejected, match="something new"):
        CommandSlurm(answer).cancel(7)
