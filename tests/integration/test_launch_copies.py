"""Two copies of a run: one writes into the run's folder, the other stops."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.checkpoints.claims import End, Fence, newest
from tests.fakes.launched import TRAIN, Launched
from tests.fakes.nodes import Nodes


def copy_of(tmp_path: Path, name: str, steps: int, *flags: str) -> Launched:
    """A copy of the run on a node of its own: another shared memory, the same folder."""
    (tmp_path / name).mkdir()
    return Launched(tmp_path / name, f"{TRAIN}\ntrain({steps})", "--run-dir", str(tmp_path / "run"), *flags)


def claims(tmp_path: Path) -> list[int]:
    """The generations that have been claimed."""
    return sorted(int(path.stem) for path in (tmp_path / "run/generations").glob("*.json"))


def test_a_second_copy_is_refused(tmp_path: Path) -> None:
    """The first one renews its lease, and goes on undisturbed."""
    with copy_of(tmp_path, "one", 100_000) as one:
        one.event("generation_started")
        with copy_of(tmp_path, "two", 100_000) as two:
            assert two.wait() == exitcodes.FENCED
            assert "is being run by a launcher on" in two.err and "--take-over" in two.err
        assert one.ask(cmd="status")["state"] == "running"
    assert claims(tmp_path) == [1]


def test_the_older_copy_stops(tmp_path: Path) -> None:
    """It is told within seconds, kills its ranks, which could not save any more, and says why in a sentence."""
    with copy_of(tmp_path, "one", 100_000) as one:
        one.event("generation_started")
        with copy_of(tmp_path, "two", 100_000, "--take-over") as two:
            two.event("generation_started")
            assert one.wait() == exitcodes.FENCED
            said = f"opsd: another copy of this run has begun in {tmp_path}/run; this one stops"
            assert one.err.splitlines()[-1] == said
            assert [event["generation"] for event in two.events("generation_started")] == [2]
            assert two.ask(cmd="status")["state"] == "running"
    assert claims(tmp_path) == [1, 2]


def copy_on_two_nodes(tmp_path: Path, job: str, *flags: str) -> Nodes:
    """A copy of the run as a Slurm job of its own, in the common folder."""
    folder = tmp_path / job
    folder.mkdir()
    environ = {name: {"SLURM_JOB_ID": job} for name in ("n1", "n2")}
    nodes = Nodes(folder, f"{TRAIN}\ntrain(100_000, step_s=0.02)", "--nnodes=2", *flags, count=2, environ=environ)
    nodes.run = tmp_path / "run"
    return nodes


def test_a_second_copy_on_several_nodes_is_refused(tmp_path: Path) -> None:
    """Each of its launchers names the job that has the run."""
    with copy_on_two_nodes(tmp_path, "4242") as one:
        one.until(lambda: len(one.events("generation_started")) == 1)
        with copy_on_two_nodes(tmp_path, "4243") as two:
            assert two.wait() == {"n1": exitcodes.FENCED, "n2": exitcodes.FENCED}
            assert "is being run by job 4242: its lease is renewed" in two.said("n1")
        assert [one.state(name)["state"] for name in one.names] == ["running", "running"]
    assert claims(tmp_path) == [1]


def test_the_older_copy_on_several_nodes_stops(tmp_path: Path) -> None:
    """All its launchers end with the code for that; the other goes on."""
    with copy_on_two_nodes(tmp_path, "4242") as one:
        one.until(lambda: len(one.events("generation_started")) == 1)
        with copy_on_two_nodes(tmp_path, "4243", "--take-over") as two:
            two.until(lambda: len(two.events("generation_started")) == 2)
            assert one.wait() == {"n1": exitcodes.FENCED, "n2": exitcodes.FENCED}
            assert "another copy of this run has begun" in one.said("n1")
            assert [two.state(name)["state"] for name in two.names] == ["running", "running"]
    assert claims(tmp_path) == [1, 2]


def test_the_older_copy_does_not_restart(tmp_path: Path) -> None:
    """A restart of its ranks would be a generation that the newer copy has claimed."""
    with copy_of(tmp_path, "one", 100_000) as one:
        one.event("generation_started")
        with copy_of(tmp_path, "two", 100_000, "--take-over") as two:
            two.event("generation_started")
            with suppress(OSError, ValueError):  # it may have noticed the other by then
                assert one.ask(cmd="restart") == {"ok": True}
            assert one.wait() == exitcodes.FENCED
    assert claims(tmp_path) == [1, 2]


def test_restarts_and_later_starts_go_on_counting(tmp_path: Path) -> None:
    """A run alone is never in its own way: each generation is claimed, and the end, after which saves may end."""
    fail = "train(3, at=1, do=lambda: generation == 1 and sys.exit(1))"
    (tmp_path / "one").mkdir()
    with Launched(tmp_path / "one", f"{TRAIN}\n{fail}", "--run-dir", str(tmp_path / "run")) as one:
        assert one.wait() == exitcodes.OK, one.err
    assert claims(tmp_path) == [1, 2, 3]
    for number in (1, 2):
        Fence(tmp_path / "run", number).check()
    with copy_of(tmp_path, "two", 3) as two:
        assert two.wait() == exitcodes.OK, two.err
    assert claims(tmp_path) == [1, 2, 3, 4, 5]
    assert newest(tmp_path / "run").end == End(0, "all ranks finished")  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_claimed(tmp_path: Path) -> None:
    """Nothing is started that could not save: one sentence with the folder and the reason."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/generations").write_text("")
    with copy_of(tmp_path, "one", 3) as one:
        assert one.wait() == exitcodes.FAILED
        assert "generations" in one.err and len(one.err.splitlines()) == 1, one.err
        assert not one.events("generation_started")


def late(tmp_path: Path, environ: dict[str, str]) -> Nodes:
    """A run on two of three nodes; the launcher of the third is not started."""
    names = ("n1", "n2", "n3")
    return Nodes(
        tmp_path,
        f"{TRAIN}\ntrain(3)",
        "--nnodes=2:3",
        "--last-call=0",
        "--join-timeout=600",
        count=3,
        environ=dict.fromkeys(names, environ),
    )


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3"}


@pytest.mark.parametrize("environ", [STEP, {"SLURM_JOB_ID": "7", "OPSD_BATCH": "ab"}], ids=["step", "slurm run"])
def test_who_comes_after_the_end_ends_like_the_others(tmp_path: Path, environ: dict[str, str]) -> None:
    """A launcher whose node was slow to start it: nobody will come any more, and it holds its node no longer."""
    with late(tmp_path, environ) as nodes:
        nodes.kill("n3")
        nodes.until(lambda: nodes.events("finished"))
        nodes.start("n3")
        assert nodes.wait(20) == {"n1": exitcodes.OK, "n2": exitcodes.OK, "n3": exitcodes.OK}


def test_the_end_of_another_step_is_nobodys(tmp_path: Path) -> None:
    """The next step of the job has the run's name, and goes on from what is there."""
    with late(tmp_path, STEP) as nodes:
        nodes.kill("n3")
        assert nodes.wait(40)["n1"] == exitcodes.OK
        for name in nodes.names:
            nodes._environ = {**nodes._environ, name: {**STEP, "SLURM_STEP_ID": "1"}}
            nodes.start(name)
        assert set(nodes.wait(40).values()) == {exitcodes.OK}
        assert len(nodes.events("generation_started")) == 2
