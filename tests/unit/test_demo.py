"""The demo's judgement: it passes only when what it promises came true."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opsd.checkpoints.manifest import CheckpointError, FileEntry, Manifest, checksum, commit, folder_of, verify
from opsd.client import Reporter
from opsd.demo.faults import FAULTS, DemoFault, Director, FaultTargets, Trial, observe
from opsd.demo.scene import DemoError, Gpus, RunSnapshot, Scene, copy_text, open_scene, parse_gpus, prepare_gpus
from opsd.demo.view import alarms, culprit_name, describe_event, differing_steps, losses, sparkline, stories
from opsd.rank_page import read_page

NOTHING = RunSnapshot(wall=0.0, pages=(), events=(), incidents=(), gpus={}, standby=1)


def recovered_when_stepping(trial: Trial, now: RunSnapshot) -> float | None:
    return now.wall if now.step > trial.injected_step else None


class Injections(list[str]):
    """Records what was injected instead of breaking anything."""

    def fault(self, kind: str, **expected: object) -> DemoFault:
        def inject(_targets: FaultTargets, _now: RunSnapshot) -> dict[str, object]:
            self.append(kind)
            return expected

        return DemoFault(kind, kind, runbook=f"{kind}_runbook", inject=inject, recovered=recovered_when_stepping)


def incident(kind: str, opened_at: float, state: str = "open", **culprit: object) -> dict[str, Any]:
    return {"id": kind, "kind": f"{kind}_runbook", "state": state, "opened_at": opened_at, "culprit": culprit}


@pytest.fixture
def at_step(tmp_path: Path):
    """Snapshots of a one-rank run at a given step and time."""
    reporter = Reporter(tmp_path / "rank-0000.page")

    def snapshot(step: int, wall: float, **fields: Any) -> RunSnapshot:
        reporter.step(step=step)
        return replace(NOTHING, wall=wall, pages=(read_page(tmp_path / "rank-0000.page"),), **fields)

    return snapshot


@pytest.fixture
def targets(tmp_path: Path) -> FaultTargets:
    return FaultTargets(tmp_path, tmp_path, None)


def test_faults_come_one_after_the_other_on_a_steady_run(at_step, targets: FaultTargets) -> None:
    """The next fault waits until the last one is repaired and the run has been steady for a while."""
    done = Injections()
    director = Director(targets, (done.fault("a"), done.fault("b")), gap_steps=5, gap_s=1)
    director.tick(at_step(0, 0.0))
    director.tick(at_step(4, 2.0))
    assert done == []
    director.tick(at_step(5, 2.0))
    assert done == ["a"]
    director.tick(at_step(20, 9.0))
    assert done == ["a"], "not detected yet"
    director.tick(at_step(21, 10.0, incidents=[incident("a", 9.5)]))
    director.tick(at_step(30, 12.0, incidents=[incident("a", 9.5)]))
    assert done == ["a", "b"]


def test_a_cold_launcher_is_waited_for_but_not_for_ever(at_step, targets: FaultTargets) -> None:
    """A fault waits for warm interpreters, and comes without them when they do not turn up."""
    done = Injections()
    director = Director(targets, (done.fault("a"),), gap_steps=1, gap_s=0, warm_s=10)
    for step, wall in enumerate((0.0, 2.0, 9.0)):
        director.tick(at_step(step, wall, standby=0))
    assert done == []
    director.tick(at_step(3, 11.0, standby=0))
    assert done == ["a"]


def test_an_unrepaired_fault_does_not_stop_the_show(at_step, targets: FaultTargets) -> None:
    """After its time is up the next fault is injected, and the trial stays failed."""
    done = Injections()
    director = Director(targets, (done.fault("a"), done.fault("b")), gap_steps=1, gap_s=0, limit_s=10)
    for step, wall in enumerate((0.0, 1.0, 5.0, 12.0, 13.0)):
        director.tick(at_step(step, wall))
    assert done == ["a", "b"]
    assert not director.trials[0].passed
    assert not director.done
    director.tick(at_step(9, 13.0 + director.end_s + 1))
    assert director.done


def test_only_an_incident_after_the_injection_counts(at_step, targets: FaultTargets) -> None:
    """An old incident of the same kind is not a detection."""
    trial = Trial(Injections().fault("a"), injected_at=10.0, injected_step=3, expected={})
    observe(trial, at_step(9, 11.0, incidents=[incident("a", 9.0)]))
    assert trial.detected_at is None
    observe(trial, at_step(9, 12.0, incidents=[incident("a", 9.0), incident("a", 11.5, "resolved")]))
    assert (trial.detected_at, trial.passed) == (11.5, True)


@pytest.mark.parametrize(
    ("named", "right"),
    [
        ({"component": "rank", "rank": 1, "gpu": None}, True),
        ({"component": "rank", "rank": 0, "gpu": None}, False),
        ({"component": "gpu", "rank": 1, "gpu": 1}, False),
    ],
)
def test_the_wrong_culprit_fails_the_trial(at_step, named: dict[str, object], right: bool) -> None:
    """Detected and repaired is not enough: the culprit must be the one that was broken."""
    fault = Injections().fault("a")
    trial = Trial(fault, injected_at=1.0, injected_step=0, expected={"component": "rank", "rank": 1})
    observe(trial, at_step(9, 3.0, incidents=[incident("a", 2.0, "resolved", **named)]))
    assert trial.passed is right


def test_lost_steps_are_those_of_this_fault(at_step) -> None:
    """Steps lost to an earlier restart are not charged to a later fault."""
    trial = Trial(Injections().fault("a"), injected_at=10.0, injected_step=3, expected={})
    events = [{"event": "resumed", "t": t, "lost_steps": n} for t, n in ((5.0, 7), (12.0, 4))]
    observe(trial, at_step(9, 13.0, incidents=[incident("a", 11.0)], events=events))
    assert trial.lost_steps == 4


def test_losses_are_compared_to_the_last_bit(tmp_path: Path) -> None:
    """A difference in the last digit, a recomputed step that differs, and a missing step are all found."""

    def written(name: str, records: list[tuple[int, str]]) -> dict[int, list[str]]:
        path = tmp_path / name
        path.write_text("".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in records))
        return losses(path)

    one = written("a", [(0, "2.5"), (1, "2.25"), (2, "2.0"), (3, "1.5")])
    same = written("b", [(0, "2.5"), (1, "2.25"), (2, "2.0"), (1, "2.25"), (2, "2.0"), (3, "1.5")])
    other = written("c", [(0, "2.5"), (1, "2.25"), (1, "2.2500000000000004"), (2, "2.0000000000000001")])
    assert differing_steps(one, same) == []
    assert differing_steps(one, other) == [1, 2, 3]


def test_text_is_the_same_every_time(tmp_path: Path) -> None:
    """The demo's text is real, bounded, and does not depend on the run."""
    first, second = copy_text(tmp_path / "a", 100_000), copy_text(tmp_path / "b", 100_000)
    assert first == second >= 100_000
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in "ab"]
    assert names[0] == names[1]


def test_without_a_compiler_the_faults_of_gpus_are_left_out(tmp_path: Path) -> None:
    """The summary's reason is the sentence that says what to install, unless the machine has real GPUs."""
    (tmp_path / "shm").mkdir()
    scene = Scene(tmp_path, tmp_path / "shm")
    why = prepare_gpus(scene, path=str(tmp_path))
    scene.begin("disturbed")
    assert Gpus.create(scene).simulated is None
    assert scene.library is None
    assert "no C compiler" in why or "real GPUs" in why
    scene.close()
    assert not (tmp_path / "shm").exists()
    assert any(fault.simulated for fault in FAULTS)


@pytest.mark.parametrize("kind", ["missing", "small"])
def test_shared_memory_that_does_not_do_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With what to do in a container, where 64 MiB or none are the default; nothing is left behind."""
    if kind == "small":
        monkeypatch.setattr("opsd.demo.scene.SHM_BYTES", 1 << 62)
        (tmp_path / "shm").mkdir()
    with pytest.raises(DemoError, match=r"shared memory, and .*; in a container mount a .*tmpfs there"):
        open_scene(tmp_path / "work", tmp_path / "shm")
    assert not list(tmp_path.glob("shm/*"))


def test_a_slow_processor_is_not_blamed_on_opsd() -> None:
    """Other programs on the machine slow a rank down, which opsd notices rightly; anything else is a false alarm."""
    found = [
        {"kind": "straggler", "summary": "rank 1 is slow", "culprit": {"component": "rank", "rank": 1}},
        {"kind": "gpu_throttle", "summary": "GPU 1 is hot", "culprit": {"component": "gpu", "gpu": 1}},
    ]
    assert alarms(found, 0.3) == (["gpu_throttle"], "rank 1 is slow", "")
    assert alarms(found, 0.05) == (["straggler", "gpu_throttle"], "", "")


def test_a_full_disk_of_the_machine_is_no_false_alarm() -> None:
    """The agent of the demo sees the whole machine; what is about the run is one, whoever is to blame."""
    full = {"kind": "storage_full", "summary": "/ is full", "culprit": {"component": "storage"}}
    assert alarms([full], 0.0) == ([], "", "/ is full")
    assert alarms([{**full, "run": "undisturbed"}], 0.0) == (["storage_full"], "", "")


def test_gpu_numbers_come_from_the_metrics() -> None:
    """The view shows what the agent exports, and nothing where the agent is silent."""
    text = 'DCGM_FI_DEV_GPU_TEMP{gpu="3",UUID="x"} 71\nopsd_other{gpu="3"} 5\nDCGM_FI_DEV_SM_CLOCK{gpu="3"} 1980\n'
    assert parse_gpus(text) == {3: {"temperature": 71.0, "clock_mhz": 1980.0}}
    assert parse_gpus(None) is None


def test_each_fault_is_told_in_plain_words(at_step) -> None:
    """What broke, who noticed and when, and what a person would have had to do; or that it went wrong."""
    fault = replace(Injections().fault("a"), broke="a GPU broke", by_hand="replace it")
    trials = [Trial(fault, injected_at=1.0, injected_step=0, expected={}) for _ in (1, 2)]
    found = [incident("a", 3.5, "resolved")]
    observe(trials[0], at_step(9, 4.0, incidents=found, events=[{"event": "rank_exited", "t": 1.5}]))
    assert stories(trials) == [
        "1. A GPU broke: the launcher noticed after 0.5 s, all was well after 3.0 s. Without opsd: replace it.",
        "[red]2. A GPU broke: not detected, named and repaired as it should be[/]",
    ]


def test_words_for_people() -> None:
    """Culprits and events read as people say them."""
    assert culprit_name({"component": "gpu", "gpu": 1, "rank": 1}) == "GPU 1 (rank 1)"
    assert culprit_name({"component": "data", "gpu": None, "rank": 0}) == "data of rank 0"
    assert culprit_name({"component": "storage", "rank": None, "detail": "rank-0.bin"}) == "storage: rank-0.bin"
    event = {"event": "rank_exited", "culprit": True, "rank": 1, "exit": "signal SIGKILL", "step": 41}
    assert describe_event(event) == "launch rank 1 ended by signal SIGKILL after step 41"
    assert describe_event(json.loads('{"event": "checkpoint_committed", "step": 20}')) is None


def test_sparkline_fits_and_falls() -> None:
    """A falling series gives falling bars, in the width asked for."""
    bars = sparkline([float(value) for value in range(200, 0, -1)], 40)
    assert len(bars) == 40
    assert (bars[0], bars[-1]) == ("█", "▁")
    assert sparkline([float("nan")], 10) == ""


def test_an_incident_told_twice_fails_the_trial(at_step, targets: FaultTargets) -> None:
    """What a fault brings about must be put down to it, not told as an incident of its own."""
    fault = replace(Injections().fault("a"), symptoms=("rank_crash",))
    trial = Trial(fault, injected_at=1.0, injected_step=0, expected={})
    observe(trial, at_step(9, 3.0, incidents=[incident("a", 2.0, "verifying")]))
    assert not trial.passed
    observe(
        trial, at_step(9, 4.0, incidents=[{**incident("a", 2.0, "resolved"), "symptoms": [{"kind": "rank_crash"}]}])
    )
    assert trial.passed


def test_a_damaged_checkpoint_is_all_that_is_left(tmp_path: Path) -> None:
    """The fault takes the copy in memory away too, from which the run would go on without ever reading the damage."""
    folder = folder_of(tmp_path / "checkpoints", 20)
    folder.mkdir(parents=True)
    (folder / "rank-0000.safetensors").write_bytes(bytes(100))
    entry = FileEntry("rank-0000.safetensors", 100, checksum(folder / "rank-0000.safetensors"))
    commit(folder, Manifest(20, 80, {"dp": 1}, "digest", (entry,), "local", 0.0, "run"))
    kept = [tmp_path / "rank-0000.state", tmp_path / "rank-0000.state.json"]
    for path in kept:
        path.write_bytes(b"")
    (fault,) = (fault for fault in FAULTS if fault.kind == "corrupt_checkpoint")
    with subprocess.Popen(["sleep", "600"]) as rank:
        page = replace(read_page(written(tmp_path)), pid=rank.pid)
        expected = fault.inject(FaultTargets(tmp_path / "checkpoints", tmp_path, None), replace(NOTHING, pages=(page,)))
        assert rank.wait(10) == -signal.SIGKILL
    assert expected == {"component": "storage", "detail": "rank-0000.safetensors"}
    with pytest.raises(CheckpointError, match="checksum"):
        verify(folder)
    assert not any(path.exists() for path in kept)


def written(folder: Path) -> Path:
    """A page of rank 0."""
    Reporter(folder / "rank-0000.page").step(step=20)
    return folder / "rank-0000.page"
