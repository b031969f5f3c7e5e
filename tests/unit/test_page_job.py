"""The page of a job: what is known of it on this node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from opsd.agent.loop import Snapshot
from opsd.agent.web.app import App, PageCache, Request
from opsd.agent.web.fleet import Answer, IncidentSummary, NodeOfJob, OtherNodes
from opsd.agent.web.history import ENDED_S, History
from opsd.agent.web.job_page import job_page, node_of_job
from opsd.agent.web.ledgers import LedgerResult
from opsd.collectors.base import Metric, Sample, StepFact
from opsd.collectors.lib.rank_series import MFU, ROUTER_DROPPED, ROUTER_ENTROPY, ROUTER_LIMIT, ROUTER_LOAD
from tests.fakes.incidents import WALL, incident
from tests.unit.test_page import HOSTILE, Structure, rank, run, samples, snapshot
from tests.unit.test_plan_forecast import PLAN

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
