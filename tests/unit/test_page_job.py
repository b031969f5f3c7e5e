"""The page of a job: what is known of it on this node, with its ledgers and incidents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opsd.agent.judge import Judge
from opsd.agent.lifecycle import merged, opened
from opsd.agent.loop import Snapshot
from opsd.agent.store import from_json, to_json
from opsd.agent.web.app import App, PageCache, Request
from opsd.agent.web.fleet import Answer, IncidentSummary, NodeOfJob, OtherNodes
from opsd.agent.web.history import ENDED_S, History
from opsd.agent.web.job_page import job_page, node_of_job
from opsd.agent.web.ledgers import FRESH_S, KEPT, REST, USER_REST, LedgerMaker, LedgerResult, Ledgers, RunSeconds
from opsd.agent.window import Window
from opsd.collectors.base import Metric, RankFact, Reading, Sample, StepFact
from opsd.collectors.lib.rank_series import MFU, ROUTER_DROPPED, ROUTER_ENTROPY, ROUTER_LIMIT, ROUTER_LOAD
from opsd.runbooks.base import Culprit, Finding, Runbook
from tests.fakes import facts
from tests.fakes.clock import FakeClock, eventually
from tests.fakes.collectors import SILENT
from tests.fakes.incidents import WALL, finding, incident
from tests.fakes.tree import FUSE, holding_mount
from tests.unit.test_page import HOSTILE, Structure, rank, run, samples, snapshot
from tests.unit.test_plan_forecast import PLAN

# The page of a job: what is known of it on this node.


LEDGER: dict[str, Any] = {
    "wall_s": 1000.0,
    "ettr": 0.9,
    "buckets": {"productive": 900.0, "restart": 100.0, "load": 0.0},
    "steps": 1234,
    "generations": 3,
    "finished": False,
    "notes": ["the run has not finished"],
}

MADE = LedgerResult(LEDGER)

TOKENS = Metric("opsd_rank_tokens_per_second", "Tokens.", labels=("run", "rank"))


def speeds(run: str, ranks: Sequence[int]) -> tuple[Sample, ...]:
    return tuple(
        sample
        for number in ranks
        for sample in (Sample(TOKENS, 12_500.0, (run, str(number))), Sample(MFU, 0.41, (run, str(number))))
    )


def page(id: str = "4242", made: LedgerResult = MADE, others: OtherNodes | None = None, **changes: Any) -> bytes | None:
    shown = snapshot(samples=(speeds("train", (0, 1)),), **changes)
    return job_page(
        shown, History(), lambda _: made, id, "node-17", 1001.0, None if others is None else lambda _: others
    )


def told(node: str, **changes: Any) -> Answer:
    known = {
        "node": node,
        "state": "running",
        "generation": 1,
        "ranks": 8,
        "live": 8,
        "step": 117,
        "tokens_per_second": 100_000.0,
    }
    return Answer(node, f"http://{node}:9477", NodeOfJob.model_validate({**known, **changes}))


def test_everything_about_a_job_is_on_it() -> None:
    """Speed and MFU, ranks and phases, incidents of this job and no other, and the ledger with its ETTR."""
    found = page(incidents=(incident(job="4242", summary="ours"), incident("b", job="7", summary="of others")))
    assert found is not None
    text = Structure(found).text
    for said in ("job 4242", "25,000", "41.0%", "2 of 8", "ours", "ETTR 90.0%", "productive", "15 min", "1234"):
        assert said in text
    assert "of others" not in text and "load" not in text


def test_problems_come_first_then_cost_runs_and_nodes() -> None:
    """As in `opsd status`."""
    over = incident("past", job="4242", summary="a past one", resolved_at=WALL)
    found = page(incidents=(incident(job="4242", summary="ours"),), ended=(over,))
    assert found is not None
    text = Structure(found).text
    order = (
        "ours",
        "Where the time of train went",
        "Run train",
        "Nodes of the job",
        "Speed and learning",
        "a past one",
    )
    assert [*map(text.index, order)] == sorted(map(text.index, order))


def test_the_trackers_of_a_run_are_linked() -> None:
    """W&B by its address, TensorBoard by the command that shows its folder; nothing but an address becomes a link."""
    places = {"wandb": "https://wandb.ai/a/b/runs/c?x=1&y", "tensorboard": "/runs/a b/tensorboard"}
    found = page(made=LedgerResult({**LEDGER, "places": places}))
    assert found is not None and "tensorboard --logdir '/runs/a b/tensorboard'" in Structure(found).text
    assert places["wandb"] in {a["href"] for tag, a in Structure(found).tags if tag == "a"}
    for odd in ({"wandb": "javascript:alert(1)"}, {"wandb": "https://" + "x" * 999}, [], None):
        shown = page(made=LedgerResult({**LEDGER, "places": odd}))
        assert shown is not None and "Weights" not in Structure(shown).text


def test_a_mixture_of_experts_shows_its_routers() -> None:
    """How full the fullest expert is, beside what is possible; a dense model has no such line."""
    dense = page()
    assert dense is not None and "routers" not in Structure(dense).text
    metrics = (ROUTER_LOAD, ROUTER_LIMIT, ROUTER_ENTROPY, ROUTER_DROPPED)
    routers = tuple(
        Sample(metric, value, ("train", "0")) for metric, value in zip(metrics, (2.5, 32 / 3, 0.7, 0.0), strict=True)
    )
    shown = snapshot(samples=((*speeds("train", (0, 1)), *routers),))
    found = job_page(shown, History(), lambda _: MADE, "4242", "node-17", 1001.0, None)
    assert found is not None
    assert "fullest expert 2.5 x the mean (at most 10.7), entropy 70%, 0.0% dropped" in Structure(found).text


def test_a_run_has_it_under_its_name_too() -> None:
    """A run without a job has no other; what is not here has no page."""
    assert page("train") is not None
    assert page("4243") is None and page("") is None
    alone = page("train", runs=[run(job="")], ranks=[rank(0, job="")])
    assert alone is not None and "run train" in Structure(alone).text


def charts(found: bytes | None) -> list[str]:
    """What is said of each chart to those who do not see it."""
    assert found is not None
    return [str(a["aria-label"]) for tag, a in Structure(found).tags if tag == "svg" and a.get("class") == "chart"]


def test_the_course_of_the_run_is_drawn() -> None:
    """From its files where there are any, with axes and units; the last steps by phase from the ranks."""
    curves = {"loss": [[1e9, 9.0], [1e9 + 60, 2.5]], "tokens_per_s": [[1e9, 1e5], [1e9 + 60, 2e5]]}
    steps = tuple(StepFact(n, 1.0, 0.5, 1, 2.0, 1.0, {"forward": 0.1, "backward": 0.4}) for n in (1, 2))
    drawn = charts(page(made=LedgerResult({**LEDGER, "curves": curves}), ranks=[rank(0, steps=steps)]))
    assert [chart.partition(":")[0] for chart in drawn] == ["Loss", "Throughput", "Step time by phase, ranks here"]
    assert "from 2.5 to 9, last 2.5 loss" in drawn[0] and "last 2e+05 tokens/s" in drawn[1]
    assert "backward from 0.4 to 0.4, last 0.4 seconds" in drawn[2]
    assert charts(page(ranks=[rank(0)])) == []


def test_without_files_the_last_minutes_are_drawn() -> None:
    """Throughput here and the temperature of the GPUs that the run has, as the agent saw them."""
    history = History()
    for point in range(3):
        seen = (samples(2, temperature=60.0 + point), speeds("train", (0, 1)))
        history.note(replace(snapshot(1000.0 + 10 * point, samples=seen), wall=1e9 + 10 * point))
    shown = snapshot(samples=seen, ranks=[rank(1)])
    drawn = charts(job_page(shown, history, lambda _: LedgerResult(None, "no file"), "4242", "node-17", 1001.0))
    assert [chart.partition(":")[0] for chart in drawn] == ["Throughput", "Temperature", "SM clock"]
    assert "GPU 1 from 60 to 62" in drawn[1] and "GPU 0" not in drawn[1]


def test_a_run_that_has_ended_keeps_its_page_for_a_day() -> None:
    """With its last state; a later run of the same name takes its place, and only so many are remembered."""
    history, latest = History(), [snapshot(runs=[run("a", job="", state="finished", alive=False)])]
    app = App(lambda: latest[-1], {"node": "node-17"}, stale_s=1e9, history=history)
    for second, runs in ((1000.0, latest[0].runs), (1010.0, ()), (1020.0, [run(f"b-{n}") for n in range(15)])):
        latest.append(replace(snapshot(second, runs=runs), wall=second))
        history.note(latest[-1])
        for path in ("/job/a", *(["/"] if len(runs) < 8 else [])):
            status, body, _ = app(Request(path, {}))
            assert status == 200 and b'<span class="pill good">finished</span>' in body
    assert history.with_ended(latest[-1]).runs[-1].run == "a"
    again = replace(snapshot(1030.0, runs=[run("a", job="")]), wall=1030.0)
    assert [r.state for r in history.with_ended(again).runs if r.run == "a"] == ["running"]
    history.note(replace(snapshot(1040.0, runs=()), wall=1021.0 + ENDED_S))
    assert history.with_ended(snapshot(runs=())).runs == ()


def test_all_nodes_of_the_job_are_on_it() -> None:
    """Those with an incident first, then those that say nothing; the sums are over all that told."""
    silent = Answer("node-19", "http://node-19:9477", problem="does not answer: timed out")
    ill = told("node-20", live=7, incidents=(IncidentSummary(severity="critical", summary="GPU 3 is lost"),) * 3)
    found = page(others=OtherNodes((told("node-18"), silent, ill), "10 more are not asked."))
    assert found is not None
    text = Structure(found).text
    for said in (
        "3 of 4 answer",
        "17 of 18",
        "225,000",
        "timed out",
        "GPU 3 is lost (3 times)",
        "10 more are not asked.",
    ):
        assert said in text
    assert text.index("node-20") < text.index("node-19") < text.index("node-18")
    alone = page()
    assert alone is not None and "Only this node is known" in Structure(alone).text


def test_a_job_of_very_many_nodes_is_still_a_small_page() -> None:
    """At most 50 KB, with the sums of all of them."""
    incidents = (IncidentSummary(severity="warning", summary="x" * 200),)
    found = page(others=OtherNodes(tuple(told(f"node-{number:04d}", incidents=incidents) for number in range(128))))
    assert found is not None and len(found) <= 50_000
    assert "and 96 more" in Structure(found).text and "129 of 129" in Structure(found).text


def test_a_node_tells_others_what_it_knows_of_a_job() -> None:
    """In brief: incidents of this job that are not over, and not their symptoms."""
    known = (
        incident("a", job="4242", summary="ours"),
        incident("b", job="7"),
        incident("c", job="4242", cause="a"),
        incident("d", job="4242", resolved_at=1.0),
    )
    shown = snapshot(samples=(speeds("train", (0, 1)),), incidents=known)
    brief = node_of_job(shown, "4242", "node-17", 1001.0)
    assert brief is not None
    assert (brief.node, brief.state, brief.ranks, brief.live, brief.tokens_per_second) == (
        "node-17", "running", 2, 2, 25_000.0
    )  # fmt: skip
    assert [told.summary for told in brief.incidents] == ["ours"]
    assert brief.silent_s is not None and brief.step is not None
    assert node_of_job(shown, "4243", "node-17", 1001.0) is None
    app = App(lambda: shown, {"node": "node-17"}, stale_s=5.0)
    status, body, _ = app(Request("/api/v1/jobs/4242", {}))
    assert (status, NodeOfJob.model_validate_json(body).ranks) == (200, 2)
    assert app(Request("/api/v1/jobs/4243", {}))[0] == 404


def test_without_a_ledger_it_says_why() -> None:
    """The rest of the page is there."""
    found = page(made=LedgerResult(None, "events.jsonl: Permission denied"))
    assert found is not None and "No ledger: events.jsonl: Permission denied" in Structure(found).text


def test_what_was_written_into_names_has_no_effect() -> None:
    """Script in names, notes and errors is text."""
    shown = {"runs": [run(HOSTILE, job=HOSTILE)], "ranks": [rank(0, run=HOSTILE, job=HOSTILE)]}
    hostile = told(HOSTILE, state=HOSTILE[:32], incidents=(IncidentSummary(severity="bad", summary=HOSTILE),))
    others = OtherNodes((Answer(HOSTILE, HOSTILE, hostile.summary), Answer(HOSTILE, HOSTILE, problem=HOSTILE)), HOSTILE)
    for made in (LedgerResult(None, HOSTILE), LedgerResult({**LEDGER, "buckets": {HOSTILE: 1.0}, "notes": [HOSTILE]})):
        found = page(HOSTILE, made=made, others=others, **shown)
        assert found is not None
        assert not {tag for tag, _ in Structure(found).tags} & {"script", "img"}


def test_a_run_with_a_plan_shows_its_forecast() -> None:
    """Beside the ledger that it is made from."""
    planned = {
        **LEDGER,
        "plan": PLAN.model_dump_json(),
        "tokens": 1e9,
        "lost_nodes": 0,
        "earlier_tokens": 0,
        "gpus": 384,
    }
    text = Structure(page(made=LedgerResult(planned)) or b"").text
    assert "days left" in text and "30.0 were planned" in text and "advised" in text
    assert "days left" not in Structure(page() or b"").text


def test_a_page_is_made_once_a_second() -> None:
    """For everybody who asks for the same one; a newer snapshot or another second renders it again."""
    pages, first, second = PageCache(), snapshot(), snapshot()
    made = []

    def look(key: str, of: Snapshot, now: float) -> bytes | None:
        def make() -> bytes:
            made.append(key)
            return key.encode()

        return pages.get(key, of, now, make)

    assert [look("a", first, 10.1), look("a", first, 10.9), look("b", first, 10.9)] == [b"a", b"a", b"b"]
    assert made == ["a", "b"]
    look("a", second, 10.9)
    look("a", second, 11.0)
    assert made == ["a", "b", "a", "a"]


# The ledgers on the page of a job, which a process of its own makes, and the counters that are made of them.


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


# Which run an incident is about, and on which pages it therefore is.


HERE = Culprit("node", "node")


def run_of(found: Finding, *ranks: RankFact) -> str:
    """The run of the incident that ``found`` opens on a node with these ranks."""
    window = Window("node", seconds=60)
    window.begin(100.0, 1e9)
    window.add("ranks", Reading(facts=ranks))
    book = Runbook(lambda _: [found], lambda *_: False, kind="trouble")
    (judged,) = Judge([book], SILENT).findings(window)
    assert from_json(to_json(opened(judged, 1e9))).run == judged.run
    return judged.run


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "smol"),
        ({"culprit": Culprit("gpu", "node", 1)}, "other"),
        ({"culprit": Culprit("gpu", "node", 7)}, ""),
        ({"culprit": HERE}, ""),
        ({"culprit": HERE, "job": "77"}, "other"),
        ({"data": {"run": "said"}}, "said"),
        ({"run": "said"}, "said"),
    ],
)
def test_the_run_is_that_of_the_gpu_unless_the_finding_names_one(changes: dict[str, Any], named: str) -> None:
    """A GPU without ranks has none; what concerns the node concerns a run only if there is one."""
    two = facts.rank(0, job=""), facts.rank(1, run="other", job=str(changes.get("job", "")))
    assert run_of(finding(**{"job": "", **changes}), *two) == named


def test_what_concerns_the_node_concerns_its_only_run() -> None:
    """As long as it runs."""
    assert run_of(finding(culprit=HERE, job=""), facts.rank(0, job="")) == "smol"
    assert run_of(finding(culprit=HERE, job=""), facts.rank(0, job="", process=None)) == ""


def test_an_incident_keeps_its_run_when_the_rank_has_gone() -> None:
    """The finding then no longer knows it."""
    old = opened(finding(run="smol"), 1e9)
    assert merged(old, finding(run=""), 1e9 + 1).run == "smol"


def shown(id: str, job: str = "") -> str:
    known = (
        incident("a", job="", run="train", summary="GPU 1 failed"),
        incident("b", job="", run="other", summary="GPU 2 failed"),
        incident("c", job="4242", run="", summary="GPU 3 failed"),
        incident("d", job="4100", run="train", summary="GPU 4 failed"),
        incident("e", job="", run="", summary="GPU 5 failed"),
    )
    now = snapshot(incidents=known, runs=[run(job=job)], ranks=[rank(0, job=job)])
    page = job_page(now, History(), lambda _: MADE, id, "node-17", 1001.0)
    brief = node_of_job(now, id, "node-17", 1001.0)
    assert page is not None and brief is not None
    text = Structure(page).text
    assert all((i.summary in text) == (i.summary in {told.summary for told in brief.incidents}) for i in known)
    return ", ".join(i.id for i in known if i.summary in text)


def test_a_run_without_a_job_has_its_incidents_on_its_page() -> None:
    """Under its name; a job's number has those of the job, and a run's name those of all its jobs."""
    assert shown("train") == "a, d"
    assert shown("4242", "4242") == "a, c"
    assert shown("train", "4242") == "a, c, d"
