"""Which node a job's failure is blamed on: the one that its next, good start was without."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest

from opsd.lemons import NodeFailure
from opsd.slurm import job_faults
from opsd.slurm.port import SlurmDenied, SlurmMissing, SlurmRejected
from opsd.slurm.runner import Output

NOW = 1e9


def faults_in(text: str, now: float = NOW) -> list[NodeFailure]:
    """What root finds in one answer of sacct."""
    return job_faults.read(lambda *_: Output(0, text, ""), now, days=0, user="")


@pytest.mark.parametrize(
    ("starts", "blamed"),
    [
        (["7|NODE_FAIL|0:0|100|n[1-3]", "7|COMPLETED|0:0|900|n[1-2,4]"], [("n3", 100.0)]),
        (["7|RUNNING|0:0|Unknown|n[1-2,4]", "7|FAILED|1:0|100|n[1-3]"], [("n3", 100.0)]),
        (["7|FAILED|1:0|100|n1", "7|COMPLETED|0:0|900|n2"], [("n1", 100.0)]),
        (["7|FAILED|1:0|100|n1", "7|FAILED|1:0|900|n2"], []),
        (["7|FAILED|1:0|100|n[1-4]", "7|COMPLETED|0:0|900|n[5-8]"], []),
        (["7|FAILED|1:0|100|n[1-4]", "7|COMPLETED|0:0|900|n[1-4]"], []),
        (["7|CANCELLED by 1000|0:0|100|n1", "7|COMPLETED|0:0|900|n2"], []),
        (["7|REQUEUED|0:0|100|n[1-3]", "7|RUNNING|0:0|Unknown|n[1-2,4]"], [("n3", 100.0)]),
        (["7|FAILED|1:0|100|n1", "7|CANCELLED by 1000|0:0|900|n2"], []),
        (["7|FAILED|1:0|100|n1", "7|OUT_OF_MEMORY|0:0|900|n2"], []),
        (["7|NODE_FAIL|0:0|100|n[1-2]", "7|TIMEOUT|0:0|900|n1"], [("n2", 100.0)]),
        (["7|REQUEUED|0:0|100|n1", "7|RUNNING|0:0|Unknown|n2"], []),
        (["7|REQUEUED|9:0|100|n1", "7|RUNNING|0:0|Unknown|n2"], [("n1", 100.0)]),
        (["7|RESIZING|0:0|100|n[1-2]", "7|COMPLETED|0:0|900|n1"], []),
        (["7|FAILED|1:0|100|n1", "8|COMPLETED|0:0|900|n2", "9|FAILED|1:0|5|None assigned"], []),
    ],
)
def test_the_node_that_the_next_start_was_without_is_blamed(starts: list[str], blamed: list[tuple[str, float]]) -> None:
    """Only if it is one, if that start went well, and if the failure was one."""
    faults = faults_in("\n".join(f"{start}|ada" for start in starts))
    assert faults == [NodeFailure(node, "job", at, at) for node, at in blamed]


def test_a_user_blames_a_node_once_a_day() -> None:
    """A thousand tasks with one error say no more than one does; other users and days count."""
    failures = [("ada", 100), ("ada", 200), ("bob", 300), ("ada", 86_500)]
    lines = [
        f"{job}|{state}|0:0|{at + later}|{node}|{user}"
        for job, (user, at) in enumerate(failures)
        for state, node, later in (("FAILED", "n1", 0), ("COMPLETED", "n2", 50))
    ]
    assert [fault.at for fault in faults_in("\n".join(lines))] == [100, 300, 86_500]


def test_a_start_that_still_runs_proves_little_at_first() -> None:
    """The program may be about to fail in the same way, and a blamed node stays blamed."""
    text = "7|FAILED|1:0|100|n[1-3]|ada\n7|RUNNING|0:0|Unknown|n[1-2,4]|ada\n"
    assert faults_in(text, 100 + 6 * 3600.0) == []
    assert [fault.node for fault in faults_in(text, 100 + 25 * 3600.0)] == ["n3"]


def test_a_number_that_two_jobs_have_had_blames_nobody() -> None:
    """Slurm counts from 1 again when its state is lost; what failed was another user's."""
    assert faults_in("7|FAILED|1:0|100|n1|ada\n7|COMPLETED|0:0|900|n2|bob\n") == []


def test_a_hundred_thousand_jobs_that_failed_take_little_memory() -> None:
    """The newest are kept: the agent that asks may have 256 MiB."""
    lines = [f"{job}|FAILED|1:0|{job}|n[1-500]|ada" for job in range(100_000)]
    text = "\n".join([*lines, "99999|COMPLETED|0:0|100000|n[1-499]|ada", "0|COMPLETED|0:0|100000|n[1-499]|ada"])
    del lines
    tracemalloc.start()
    try:
        assert [fault.at for fault in faults_in(text)] == [99_999]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_an_answer_of_another_form_is_refused() -> None:
    """Rather than read as no failure."""
    well = "7|COMPLETED|0:0|900|n2|ada"
    for text in ("7|FAILED|1:0|100|n1", f"7|FAILED|1:0|100|n[3-1]|ada\n{well}"):
        with pytest.raises(SlurmRejected, match="sacct's answer has a"):
            faults_in(text)


def test_the_jobs_of_a_quarter_do_not_fill_the_memory() -> None:
    """Each answer is of a day, of which failed jobs are kept; their next start may be in the answer of another."""
    asked: list[tuple[str, ...]] = []
    starts = ["7|FAILED|1:0|100|n[1-3]|ada\n", "7|RUNNING|0:0|Unknown|n[1-2,4]|ada\n"]
    answers = [
        start + "".join(f"{number}|{state}|0:0|50|n[1-500]|eve\n" for number in range(1000 * day, 1000 * day + 8_000))
        for day, (start, state) in enumerate(zip(starts, ("COMPLETED", "FAILED"), strict=True), 1)
    ]

    def run(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        asked.append(tuple(word for word in argv if word.startswith(("--starttime", "--endtime"))))
        return Output(0, answers[len(asked) - 1], "")

    tracemalloc.start()
    try:
        assert job_faults.read(run, 1_700_049_600.0, days=1, user="") == [NodeFailure("n3", "job", 100.0, 100.0)]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert asked == [("--starttime=2023-11-14", "--endtime=2023-11-15"), ("--starttime=2023-11-15",)]


def test_a_cluster_without_accounting_says_so() -> None:
    """Whatever sacct ends with."""

    def answer(output: Output) -> None:
        def run(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
            assert argv[0] == "sacct"
            return output

        job_faults.read(run, 1e9)

    for code in (0, 1):
        with pytest.raises(SlurmRejected, match="keeps no accounting"):
            answer(Output(code, "", "Slurm accounting storage is disabled\n"))
    with pytest.raises(SlurmMissing):
        answer(Output(1, "", "sacct: fatal: Could not establish a configuration source"))


def test_an_answer_without_jobs_of_others_is_none() -> None:
    """With PrivateData=jobs sacct leaves them out for an ordinary user and says nothing; root is shown all."""
    own = "7|FAILED|1:0|100|n1|ada\n7|COMPLETED|0:0|900|n2|ada\n"

    def read(text: str, user: str) -> list[NodeFailure]:
        return job_faults.read(lambda *_: Output(0, text, ""), 1e9, user=user)

    for text in ("", own):
        with pytest.raises(SlurmDenied, match="sacct shows ada no job of another user"):
            read(text, "ada")
    blamed = [NodeFailure("n1", "job", 100.0, 100.0)]
    assert (read("", ""), read(own, ""), read(f"{own}8|RUNNING|0:0|Unknown|n1|bob\n", "ada")) == ([], blamed, blamed)
    with pytest.raises(SlurmDenied, match="sacct shows Ada no job of another user"):
        read(own, "Ada")  # slurmdbd keeps names in lower case
