"""The ledgers on the page of a job, which a process of its own makes, and the counters that are made of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from opsd.agent.web.ledgers import FRESH_S, KEPT, REST, USER_REST, LedgerMaker, LedgerResult, Ledgers, RunSeconds
from tests.fakes.clock import FakeClock, eventually
from tests.fakes.fuse import FUSE, holding_mount
from tests.unit.test_page import rank, run, snapshot
from tests.unit.test_page_job import LEDGER
from tests.unit.test_plan_forecast import PLAN


def test_a_ledger_is_made_when_somebody_looks() -> None:
    """Once at a time, and again after a rest that grows with the work, as does the one before the user's next."""
    clock, may_end, folders = FakeClock(), threading.Event(), []

    def make(folder: Path, _user: int) -> LedgerResult:
        folders.append(str(folder))
        assert may_end.wait(20)
        clock.advance(10.0)
        return LedgerResult(LEDGER)

    ledgers, one, other = Ledgers(make, clock=clock.monotonic), run(folder="/a"), run(folder="/b")
    for _ in range(3):
        assert "being made" in ledgers.of(one).problem and "being made" in ledgers.of(other).problem
    may_end.set()
    assert eventually(lambda: ledgers.of(one).ledger is LEDGER) and folders == ["/a"]
    clock.advance(USER_REST * 10.0)
    assert eventually(lambda: ledgers.of(other).ledger is LEDGER) and len(folders) == 2
    clock.advance((REST - USER_REST) * 10.0 - FRESH_S)
    assert ledgers.of(one).ledger is LEDGER and len(folders) == 2
    clock.advance(FRESH_S + 20.0)
    ledgers.of(one)
    assert eventually(lambda: len(folders) == 3)


def test_a_users_costly_ledgers_delay_those_of_others_by_one() -> None:
    """Sixty-four runs of one user, whose folders do not answer, and one of another."""
    clock, go, made = FakeClock(), threading.Semaphore(0), list[str]()

    def make(folder: Path, _user: int) -> LedgerResult:
        made.append(str(folder))
        assert go.acquire(timeout=60)
        clock.advance(30.0)
        return LedgerResult(LEDGER)

    ledgers, other = Ledgers(make, clock=clock.monotonic), run(folder="/other", user=1001)
    costly = [run(folder=f"/costly-{number}", user=1000) for number in range(64)]
    for one in (*costly, other):
        ledgers.of(one)
    assert eventually(lambda: len(made) == 1)
    go.release(2)
    assert eventually(lambda: ledgers.of(other).ledger is LEDGER)
    assert made == ["/costly-0", "/other"]
    for one in costly:
        assert ledgers.of(one).ledger is (LEDGER if one.folder in made else None)
    assert made == ["/costly-0", "/other"]


def test_the_ledgers_of_another_user_are_kept() -> None:
    """A user with many runs has the place of its own ones taken."""
    ledgers = Ledgers(lambda _folder, _user: LedgerResult(LEDGER))
    mine = run(folder="/mine", user=1001)
    assert eventually(lambda: ledgers.of(mine).ledger is LEDGER)
    for number in range(2 * KEPT):
        many = run(folder=f"/many-{number}", user=1000)
        assert eventually(lambda many=many: ledgers.of(many).ledger is LEDGER)
    assert ledgers.of(mine).ledger is LEDGER


def test_users_share_the_counters_of_ledgers() -> None:
    """The runs of one user fill no more than its part of the places."""
    ledgers = Ledgers(lambda folder, _user: LedgerResult({"buckets": {"productive": 1.0}}))
    runs = [run(run=f"a{number}", folder=f"/a{number}", user=1000) for number in range(2 * KEPT)]
    runs.append(run(run="z", folder="/z", user=1001))
    shown = snapshot(runs=runs, ranks=[rank(0, run=one.run) for one in runs])
    seconds = RunSeconds(ledgers)
    assert eventually(lambda: ("z", "productive") in {sample.labels for sample in seconds.samples(shown)})


def test_a_ledger_is_made_from_the_files_of_the_run(tmp_path: Path) -> None:
    """By the command of the same name; a folder that is none is told in its words."""
    assert "is not a run folder" in LedgerMaker()(tmp_path, os.getuid()).problem
    events = [{"t": 100.0, "event": "generation_started", "generation": 1}, {"t": 160.0, "event": "finished"}]
    lines = [json.dumps({"generation": 1, "exit_code": 0, **event}) for event in events]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    made = LedgerMaker()(tmp_path, os.getuid())
    assert made.ledger is not None and made.ledger["wall_s"] == 60.0
    step = json.dumps({"t": 110.0, "step": 1, "generation": 1, "step_s": 1.0, "loss": 1.0}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(step)
    (tmp_path / "plan.json").write_text(PLAN.model_dump_json())
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / "places.json").write_text('{"wandb": "https://w", "odd": 1}')
    found = LedgerMaker()(tmp_path, os.getuid()).ledger
    assert found is not None and (found["plan"], found["tokens"], found["lost_nodes"]) == (
        PLAN.model_dump_json(),
        None,
        0,
    )
    assert found["places"] == {"wandb": "https://w"}
    (tmp_path / "metrics.jsonl").write_text(step * 500_000)
    assert "too long for the agent" in LedgerMaker()(tmp_path, os.getuid()).problem


WITHOUT_SETPRIORITY = """
import ctypes, json, os, struct, sys
from pathlib import Path
from opsd.agent.web.ledgers import LedgerMaker

number = {"x86_64": 141, "aarch64": 140}[os.uname().machine]
# load the number of the call; if it is setpriority, EPERM, else allow it
program = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, number, 0x6, 0, 0, 0x50001, 0x6, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(program)
filter = struct.pack("HxxxxxxP", 4, ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0
try:
    os.setpriority(os.PRIO_PROCESS, 0, 19)
except PermissionError:
    print(json.dumps(LedgerMaker()(Path(sys.argv[1]), os.getuid()).ledger))
"""


def test_a_ledger_is_made_where_priorities_may_not_be_set(tmp_path: Path) -> None:
    """As under the service, whose filter of system calls answers with EPERM."""
    (tmp_path / "events.jsonl").write_text(
        '{"t": 100.0, "event": "generation_started", "generation": 1}\n'
        '{"t": 160.0, "event": "finished", "generation": 1, "exit_code": 0}\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SETPRIORITY, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["wall_s"] == 60.0


def test_the_buckets_of_a_ledger_are_counters() -> None:
    """On the node of rank 0, as soon as there is a ledger; what a ledger takes back does not make them fall."""
    clock, made = FakeClock(), [{"productive": 100.0, "restart": 5.0}, {"productive": 90.0, "restart": 40.0}]
    ledgers = Ledgers(lambda _f, _u: LedgerResult({"buckets": made.pop(0)}), clock=clock.monotonic)
    seconds, here = RunSeconds(ledgers), snapshot()

    def now() -> dict[tuple[str, ...], float]:
        return {sample.labels: sample.value for sample in seconds.samples(here)}

    assert now() == {}
    assert eventually(lambda: now() == {("train", "productive"): 100.0, ("train", "restart"): 5.0})
    clock.advance(FRESH_S + 1.0)
    assert eventually(lambda: now() == {("train", "productive"): 100.0, ("train", "restart"): 40.0})
    assert [*seconds.samples(snapshot(ranks=[rank(1)]))] == []
    assert not made


NOBODY = 65534
PLANNED = {
    "buckets": {"productive": 8e5, "restart": 4e5}, "plan": PLAN.model_dump_json(), "tokens": 3.3e11, "lost_nodes": 2,
    "earlier_tokens": 0, "gpus": 384,
}  # fmt: skip


def test_plan_and_forecast_are_series_of_the_same_ledger() -> None:
    """Nothing without a plan, or with one that is none."""
    for plan, known in ((PLANNED["plan"], True), ("{", False), (None, False)):
        ledgers = Ledgers(lambda _f, _u, plan=plan: LedgerResult({**PLANNED, "plan": plan}))
        seconds = RunSeconds(ledgers)
        assert eventually(lambda seconds=seconds: bool([*seconds.samples(snapshot())]))
        values = {(s.metric.name, *s.labels): s.value for s in seconds.samples(snapshot())}
        assert values["opsd_run_seconds_total", "train", "restart"] == 4e5
        assert values.get(("opsd_run_planned_seconds", "train")) == (30 * 86_400.0 if known else None)
        beyond = [values[key] for key in values if key[0] == "opsd_run_beyond_plan_seconds"]
        planned, expected = (values.get((f"opsd_run_{name}_seconds", "train"), 0.0) for name in ("planned", "forecast"))
        assert sum(beyond) == pytest.approx(expected - planned)
        assert not known or values["opsd_run_beyond_plan_seconds", "train", "restart"] == max(beyond)


def test_a_ledger_that_cannot_be_made_keeps_none_of_another_run() -> None:
    """Whatever goes wrong with one."""

    def make(folder: Path, _user: int) -> LedgerResult:
        if folder.name == "a":
            raise RuntimeError("a bug")
        return LedgerResult(LEDGER)

    ledgers = Ledgers(make)
    assert "being made" in ledgers.of(run(folder="/a")).problem
    assert eventually(lambda: "could not be made" in ledgers.of(run(folder="/a")).problem)
    assert eventually(lambda: ledgers.of(run(folder="/b")).ledger is LEDGER)


def oom_victims() -> list[str]:
    """How readily the kernel ends each process that makes a ledger, by its oom_score_adj (proc(5))."""
    makers = [path for path in Path("/proc").glob("[0-9]*") if b"opsd.ledger.for_user" in read(path / "cmdline")]
    mine = [path for path in makers if f"\nPPid:\t{os.getpid()}\n".encode() in read(path / "status")]
    return [read(path / "oom_score_adj").decode().strip() for path in mine if read(path / "cmdline")]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.skipif(os.geteuid() != 0 or not FUSE.exists(), reason="needs root and FUSE for a mount")
def test_a_user_whose_folder_holds_a_process_gets_no_other(tmp_path: Path) -> None:
    """Each kept its memory for good: one every five minutes, until the agent's 256 MiB were full.

    And while both are too much for those, the kernel ends the process and not the agent.
    """
    stuck, free = tmp_path / "stuck", tmp_path / "free"
    stuck.mkdir()
    free.mkdir()
    make = LedgerMaker(deadline_s=3.0)
    with holding_mount(stuck):
        assert oom_victims() == []
        assert make(stuck, 0).problem == f"{stuck} does not answer"
        assert oom_victims() == ["1000"]
        assert "still does not answer" in make(free, 0).problem
        assert eventually(lambda: make(free, NOBODY).problem.endswith(("is not a run folder", "Permission denied")))
    assert eventually(lambda: "is not a run folder" in make(free, 0).problem)
