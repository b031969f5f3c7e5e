"""The pages of a node and its incidents: all that matters is there, and nothing that is written there has an effect."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from opsd.agent.brief import brief, cost_now
from opsd.agent.gather import Health, Source
from opsd.agent.loop import Snapshot
from opsd.agent.web.api import status
from opsd.agent.web.app import App, Request
from opsd.agent.web.history import History
from opsd.agent.web.html import STYLE, h
from opsd.agent.web.incident_page import incident_page, runbook_list, runbook_page, timeline
from opsd.agent.web.incidents import Listing, ended_card, grouped, incident_path, open_card
from opsd.agent.web.node_page import gpu_state, node_page
from opsd.collectors import repairs, spare
from opsd.collectors.base import GpuFact, Metric, RankFact, Reading, RunFact, Sample, StepFact
from opsd.collectors.slurm import FAULTS, FLAG, LEMON
from opsd.commands.status import first_lines, under_way
from opsd.runbooks.base import Cost, Culprit, Evidence, Incident, Severity, State
from opsd.runbooks.lib.guides import guides
from tests.fakes.collectors import FakeCollector
from tests.fakes.incidents import WALL, incident, known

# The page of a node: all that matters is on it, and nothing that somebody wrote into a name has any effect.


ABOUT = {"node": "node-17", "mode": "observe", "started_at": WALL - 90_000}

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b[2J"

VOID = {"meta", "polyline", "link"}

GAUGES = {
    name: Metric(f"DCGM_FI_DEV_{name}", "A gauge.", labels=("gpu", "UUID"))
    for name in ("GPU_UTIL", "GPU_TEMP", "POWER_USAGE", "SM_CLOCK")
}

THROTTLE = Metric("opsd_gpu_throttle_seconds_total", "Throttled.", "counter", "seconds", ("gpu", "UUID", "reason"))


class Structure(HTMLParser):
    """The tags and the text of a page; raises where tags do not match."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page.decode())
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def gpu(index: int, **changes: Any) -> GpuFact:
    return GpuFact(index, f"GPU-{index}", f"0000:{index:02X}", "H100", **changes)


def rank(number: int, **changes: Any) -> RankFact:
    step = StepFact(100 + number % 2, 999.0, 0.5, 1000, 2.0, 1.0, {"forward": 0.1, "backward": 0.3, "data": 0.1})
    fields: dict[str, Any] = {
        "run": "train", "job": "4242", "rank": number, "local_rank": number, "world_size": 8, "generation": 2,
        "gpu": number, "pid": 100 + number, "state": "running", "process": "S", "phase": "backward",
        "phase_since": 990.0, "changed": 990.0, "steps_reported": 1, "committed_step": 80, "workers": (),
        "steps": (step,),
    }  # fmt: skip
    return RankFact(**{**fields, **changes})


def run(name: str = "train", **changes: Any) -> RunFact:
    fields: dict[str, Any] = {
        "run": name, "job": "4242", "node": "n", "state": "running", "generation": 2, "launcher_pid": 1, "alive": True,
        "world_size": 8, "control": "", "folder": "", "logs": "", "user": 1000,
    }  # fmt: skip
    return RunFact(**{**fields, **changes})


def samples(gpus: int, throttled_s: float = 0.0, temperature: float = 64.0) -> tuple[Sample, ...]:
    gauges = [
        Sample(metric, temperature if name == "GPU_TEMP" else 98.0, (str(index), f"GPU-{index}"))
        for index in range(gpus)
        for name, metric in GAUGES.items()
    ]
    counters = [Sample(THROTTLE, throttled_s, (str(i), f"GPU-{i}", "hw_thermal")) for i in range(gpus)]
    return (*gauges, *counters)


def snapshot(at: float = 1000.0, **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "gpus": [gpu(0), gpu(1)], "ranks": [rank(0), rank(1)], "runs": [run()], "samples": (samples(2),),
    }  # fmt: skip
    return Snapshot(1, at, WALL, **{**fields, **changes})


def page(shown: Snapshot, history: History | None = None, refresh_s: int = 0, **about: Any) -> bytes:
    return node_page(shown, history or History(), {**ABOUT, **about}, refresh_s=refresh_s, now=1001.0)


def test_everything_that_matters_is_on_it() -> None:
    """GPUs, ranks and their phases, runs with their checkpoints, incidents with evidence, cost and what was done."""
    root = incident("root", severity=Severity.CRITICAL)
    symptom = incident("symptom", summary="rank 1 is slow", cause="root")
    past = incident("past", summary="it is over", state=State.RESOLVED, resolved_at=WALL - 200, opened_at=WALL - 300)
    text = Structure(page(snapshot(incidents=(root, symptom), ended=(past,)))).text
    title = ("node-17", "policy observe", "1 incident", "up 25 h 0 min")
    for said in (*title, "GPU 0 is in trouble", "too hot", "a tenth"):
        assert said in re.sub(r"\s+", " ", text)
    for said in ("kill_process r: ok", "rank 1 is slow", "it is over", "ended 3 min ago"):
        assert said in text
    for said in ("backward", "0 of train", "step 80, 21 behind", "backward 60%, forward 20%, data 20%", "0.500 s"):
        assert said in text


def test_problems_come_first_and_what_is_over_after_the_inventory() -> None:
    """As in `opsd status`: problems, cost, what is being done, the inventory."""
    past = incident("past", summary="it is over", state=State.RESOLVED, resolved_at=WALL - 200, opened_at=WALL - 300)
    text = Structure(page(snapshot(incidents=(incident("a"), incident("b", kind="gpu_ecc")), ended=(past,)))).text
    order = ("Open incidents", "Who acts", "Runs and checkpoints", "Ranks", "it is over", "What opsd sees with")
    assert [*map(text.index, order)] == sorted(map(text.index, order))


def test_a_spare_says_whether_it_is_ready() -> None:
    """With the age of the verdict; another node says nothing of it."""
    verdict = json.dumps({"ready": True, "expires_at": 200.0, "checked_at": 40.0, "staged_bytes": 1})
    for now, said in ((100.0, "ready, verified 60 s ago"), (400.0, "not ready, verified 6 min ago")):
        shown = snapshot(samples=(spare.parse(verdict.encode(), now),))
        assert f"spare {said}" in re.sub(r"\s+", " ", Structure(page(shown)).text)
    assert "spare" not in Structure(page(snapshot())).text


def test_a_repair_is_shown_until_the_node_is_back() -> None:
    """What is done and for how long, and a node that has to be replaced while it is drained."""

    def shown(newest: repairs.Known, drained: bool) -> str:
        samples = (*repairs.samples(newest, newest.age_s(800.0, "", 0.0)), Sample(FLAG, float(drained), ("drain",)))
        return re.sub(r"\s+", " ", Structure(page(snapshot(samples=(samples,)))).text)

    assert "repair retest, remedy 2, for 12 min" in shown(known("retest", 2, 80.0), drained=True)
    assert "repair rma, remedy 3" in shown(known("rma", 3), drained=True)
    assert "repair" not in shown(known("rma", 3), drained=False)
    assert "repair" not in shown(known("returned", 1), drained=True)


@pytest.mark.parametrize(("lemon", "said"), [(1.0, ["lemon: 6 faults in 30 days, see `opsd nodes lemons`"]), (0.0, [])])
def test_opsd_status_says_that_the_node_is_a_lemon(lemon: float, said: list[str]) -> None:
    """By what the agent has looked up in Slurm; nothing where that shows none."""
    seen = snapshot(samples=((Sample(FAULTS, 6.0), Sample(LEMON, lemon)),))
    assert [Text.from_markup(note).plain for note in under_way(status(seen, ABOUT, now=1.0))] == said


def test_opsd_status_tells_problems_before_what_is_done_about_them() -> None:
    """The person on call reads the incident first, then that the node is being repaired."""
    answer = {**status(snapshot(samples=((Sample(LEMON, 1.0), Sample(FAULTS, 6.0)),)), ABOUT, now=1.0)}
    answer["journal"] = {"up": False, "problem": "disk full"}
    found = [
        {"severity": severity, "summary": f"GPU 3 is {severity}", "id": "1-2"} for severity in ("warning", "critical")
    ]
    lines = [Text.from_markup(line).plain.split()[0] for line in first_lines(answer, found)]
    assert lines == ["journal:", "critical", "warning", "lemon:"]


def test_symptoms_are_shown_with_their_cause_only() -> None:
    """Two cards for one fault would be read as two faults."""
    root, symptom = incident("root"), incident("symptom", summary="rank 1 is slow", cause="root")
    tags = [tag for tag, _ in Structure(page(snapshot(incidents=(symptom, root)))).tags]
    assert tags.count("details") == 1


def test_what_was_written_into_names_has_no_effect() -> None:
    """Script in a node's name, a run's, a log line or an error is text."""
    hostile = incident("i", summary=HOSTILE, evidence=(Evidence(HOSTILE, "log", WALL),), job=HOSTILE, verdict=HOSTILE)
    source = Source(FakeCollector("source"))
    source.health, source.reason, source.reading = Health.ERROR, HOSTILE, Reading()
    shown = snapshot(
        incidents=(hostile,), runs=[run(HOSTILE, state=HOSTILE)], ranks=[rank(0, run=HOSTILE, phase=HOSTILE)],
        gpus=[gpu(0, lost=HOSTILE)], sources=(source,), journal_problem=HOSTILE,
    )  # fmt: skip
    found = Structure(page(shown, node=HOSTILE, mode=HOSTILE))
    tags = {tag for tag, _ in found.tags}
    assert not tags & {"script", "img", "iframe", "object", "form", "input", "base"}
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert found.text.count("<script>alert(1)</script>") >= 8
    assert "\x1b" not in found.text


@given(st.text(max_size=400))
def test_any_text_becomes_text(text: str) -> None:
    """Whatever is escaped has no tags left and reads like before, but for control characters and length."""

    class Text(HTMLParser):
        seen = ""

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            raise AssertionError(tag)

        def handle_data(self, data: str) -> None:
            self.seen += data

    parser = Text(convert_charrefs=True)
    parser.feed(f"{h(text)}")
    parser.close()
    wanted = "".join(c if c.isprintable() else " " for c in text)
    assert parser.seen == (wanted if len(wanted) <= 240 else wanted[:239] + "…")


def test_it_is_small_whatever_a_node_has() -> None:
    """Sixteen GPUs with twenty minutes of history, 256 ranks and 200 incidents fit into 60 KB."""
    history = History(every_s=1.0)
    for second in range(150):
        history.note(snapshot(1000.0 + second, samples=(samples(16, temperature=60 + second % 20),)))
    evidence = tuple(Evidence("x" * 120, "log", WALL) for _ in range(10))
    many = tuple(incident(f"i{n}", evidence=evidence) for n in range(100))
    ended = tuple(incident(f"e{n}", evidence=evidence, resolved_at=WALL, state=State.RESOLVED) for n in range(100))
    crowded = snapshot(
        gpus=[gpu(i) for i in range(16)], ranks=[rank(i) for i in range(256)], incidents=many, ended=ended,
        samples=(samples(16),), runs=[run(f"run-{n}") for n in range(64)],
    )  # fmt: skip
    whole = page(crowded, history)
    assert b"<polyline" in whole
    assert len(whole) <= 60_000


def test_nothing_but_the_page_itself_is_needed() -> None:
    """No script, no other file, a language, a heading for each section, names for what is drawn or scrolls."""
    history = History(every_s=1.0)
    for second in range(5):
        history.note(snapshot(1000.0 + second, samples=(samples(2, temperature=60 + second),)))
    found = Structure(page(snapshot(incidents=(incident(),)), history))
    tags = found.tags
    assert ("html", {"lang": "en"}) in tags
    assert not any("src" in attributes for _, attributes in tags)
    assert {a["href"][0] for tag, a in tags if tag == "a"} <= {"/", "#"}
    assert not {"script", "img"} & {tag for tag, _ in tags}
    assert [str(a["href"])[:19] for tag, a in tags if tag == "link"] == ["data:image/svg+xml,"]
    assert [tag for tag, _ in tags].count("h1") == 1
    ids = {attributes["id"] for _, attributes in tags if "id" in attributes}
    assert {a["aria-labelledby"] for tag, a in tags if tag == "section"} <= ids
    assert all(a.get("aria-label") for tag, a in tags if tag == "svg" or a.get("role") == "group")
    assert all(a.get("scope") for tag, a in tags if tag == "th")
    assert "url(" not in STYLE
    assert "@import" not in STYLE


def test_the_icon_says_how_the_node_is() -> None:
    """Red among the tabs of a browser while something critical is open."""
    for found, color in (
        ((), "176f3d"),
        ((incident(severity=Severity.CRITICAL), incident("b")), "c62828"),
        ((incident("b"),), "d98e04"),
    ):
        assert f"fill='%23{color}'".encode() in page(snapshot(incidents=found))


def test_it_stays_as_it_is_unless_asked() -> None:
    """A page that loads itself again moves a screen reader back to its beginning."""
    assert b"http-equiv" not in page(snapshot())
    assert b'http-equiv="refresh" content="5"' in page(snapshot(), refresh_s=5)


def test_what_is_not_known_is_not_shown_as_healthy() -> None:
    """Before the first collection, without GPUs, with a lost one, with ranks that stopped."""
    early = Structure(page(Snapshot(-1, 1000.0, WALL))).text
    assert "the first collection is not done yet" in early
    assert "No GPU is known." in early
    lost = Structure(page(snapshot(gpus=[gpu(0, lost="fell off the bus", orphans=(7,))], samples=()))).text
    assert "lost: fell off the bus" in lost
    assert "held by dead 7" in lost
    assert "–" in lost
    assert "stopped" in Structure(page(snapshot(ranks=[rank(0, process="T")]))).text
    assert "running, no launcher" in Structure(page(snapshot(runs=[run(alive=False)]))).text
    assert "gone" in Structure(page(snapshot(ranks=[rank(0, process=None)]))).text


def test_a_run_that_ended_well_is_shown_as_finished() -> None:
    """It needs no launcher, and its ranks no process. One that failed is not green."""
    over = page(snapshot(runs=[run(state="finished", alive=False)], ranks=[rank(0, process=None, state="finished")]))
    assert over.count(b'<span class="pill good">finished</span>') == 2 and b"no launcher" not in over
    assert b'<span class="pill bad">failed</span>' in page(snapshot(runs=[run(state="failed", alive=False)]))


@pytest.mark.parametrize(
    ("found", "throttled", "margin", "said"),
    [
        (None, 0.0, 20.0, "ok"),
        (None, None, 20.0, "ok"),
        (None, 0.77, -2.0, "throttled"),
        (None, 0.03, 20.0, "throttled"),
        (None, 0.0, 0.0, "at its heat limit"),
        (None, None, 4.0, "hot"),
        (None, None, None, "answers, nothing measured"),
        (incident(kind="gpu_xid"), 0.0, 20.0, "gpu xid"),
    ],
)
def test_a_gpu_is_ok_only_if_nothing_is_known_against_it(
    found: Incident | None, throttled: float | None, margin: float | None, said: str
) -> None:
    """Its driver answering is not enough: an incident, throttling and heat count."""
    state = gpu_state(gpu(0), found, throttled, margin)
    assert f">{said}<" in state and ("good" in state) == (said == "ok")


def test_a_hot_throttled_gpu_is_not_ok() -> None:
    """92 degrees and held back for 77 % of the last minute, as the driver's series say it."""
    history = History()
    for point in range(10):
        hot = samples(1, throttled_s=point * 7.7, temperature=92.0)
        history.note(snapshot(1000.0 + 10 * point, samples=(hot,)))
    whole = page(snapshot(gpus=[gpu(0)], ranks=[], samples=(hot,)), history)
    assert b">throttled<" in whole and b"77%" in whole and b">ok<" not in whole
    alone = page(snapshot(gpus=[gpu(0)], ranks=[], samples=(hot,)))
    assert b">at its heat limit<" in alone


def test_numbers_that_are_none_do_not_break_it() -> None:
    """A loss that is not a number, values at infinity."""
    loss = Metric("opsd_rank_loss", "Loss.", labels=("run", "rank"))
    odd = Sample(GAUGES["GPU_TEMP"], math.inf, ("0", "GPU-0"))
    shown = snapshot(samples=((Sample(loss, math.nan, ("train", "0")), odd),))
    history = History(every_s=1.0)
    for second in range(3):
        history.note(snapshot(1000.0 + second, samples=shown.samples))
    assert "nan" in Structure(page(shown, history)).text


@pytest.mark.parametrize(("seconds", "share"), [(0.0, "0%"), (5.0, "50%"), (99.0, "100%")])
def test_the_throttled_share_is_that_of_the_last_minute(seconds: float, share: str) -> None:
    """Of a counter of seconds, read every 10 s."""
    history = History()
    for point in range(10):
        history.note(snapshot(1000.0 + 10 * point, samples=(samples(1, throttled_s=point * seconds),)))
    assert share in Structure(page(snapshot(gpus=[gpu(0)]), history)).text


def test_the_history_has_twenty_minutes_with_their_times() -> None:
    """A series that appeared later ends at the same time; a point that is no number begins it again."""
    history = History(points=4)
    for point in range(6):
        hot = samples(1 + (point >= 4), temperature=math.nan if point == 3 else 60.0 + point)
        history.note(replace(snapshot(1000.0 + 10 * point, samples=(hot,)), wall=WALL + 10 * point))
    assert history.points("DCGM_FI_DEV_GPU_TEMP", "GPU-0") == [(WALL + 40, 64.0), (WALL + 50, 65.0)]
    assert history.points("DCGM_FI_DEV_GPU_UTIL", "GPU-1") == [(WALL + 40, 98.0), (WALL + 50, 98.0)]
    assert [at for at, _ in history.points("DCGM_FI_DEV_GPU_UTIL", "GPU-0")] == [WALL + 10 * n for n in (2, 3, 4, 5)]
    assert history.points("DCGM_FI_DEV_GPU_TEMP", "GPU-7") == []


def test_history_forgets_what_is_gone() -> None:
    """A GPU that was replaced leaves nothing behind."""
    history = History(every_s=1.0)
    history.note(snapshot(1000.0))
    history.note(snapshot(1000.5))
    assert len(history.values("DCGM_FI_DEV_GPU_TEMP", "GPU-0")) == 1
    history.note(snapshot(1002.0, samples=()))
    assert history.values("DCGM_FI_DEV_GPU_TEMP", "GPU-0") == ()


@pytest.mark.parametrize("name", guides())
def test_every_runbook_is_a_page(name: str) -> None:
    """Where the link in an alert leads."""
    whole = runbook_page(name)
    assert whole is not None
    assert "What opsd does by itself" in Structure(whole).text
    assert f'"/runbooks/{name}"'.encode() in runbook_list()


def test_a_runbook_that_does_not_exist_has_no_page() -> None:
    """Nor has anything that looks like a path."""
    assert [runbook_page(name) for name in ("nothing", "../server", "")] == [None, None, None]


BROWSER_ACCEPTS = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize("path", ["/nothing", "/incident/none", "/job/none", "/runbooks/none", "/favicon.ico"])
def test_a_browser_gets_a_page_in_place_of_one_that_is_not_there(path: str) -> None:
    """With ways out. A program gets JSON, and from the API so does a browser."""
    app = App(lambda: snapshot(1000.0), {"node": "n17"}, stale_s=5.0)
    status, body, headers = app(Request(path, {}, BROWSER_ACCEPTS))
    page = Structure(body)
    assert (status, headers["Content-Type"]) == (404, "text/html; charset=utf-8")
    assert {"/", "/fleet", "/runbooks"} <= {attributes.get("href") for _, attributes in page.tags}
    for request in (Request(path, {}, "*/*"), Request(f"/api/v1{path}", {}, BROWSER_ACCEPTS)):
        status, body, headers = app(request)
        assert (status, set(json.loads(body)), headers["Content-Type"]) == (
            404, {"error"}, "application/json; charset=utf-8",
        )  # fmt: skip


@pytest.mark.parametrize("path", ["/runbooks", "/runbooks/gpu_xid", "/fleet", "/api/v1/status", "/metrics"])
def test_a_slash_at_the_end_changes_nothing(path: str) -> None:
    """People type it, or leave it out."""
    app = App(lambda: snapshot(1000.0), {"node": "n17"}, stale_s=5.0)
    plain, slashed = app(Request(path, {})), app(Request(f"{path}/", {}))
    assert plain[0] == slashed[0] == 200
    assert plain[2] == slashed[2]


# Incidents on the pages: equal ones are one row, and each has a page of its own.


def throttled(gpu: int, **changes: Any) -> Incident:
    said = {"summary": f"GPU {gpu} is throttled", "culprit": Culprit("gpu", "node-17", gpu), "kind": "gpu_throttle"}
    return incident(f"throttle-{gpu}", **{**said, **changes})


def crash(id: str = "crash", **changes: Any) -> Incident:
    said = {"kind": "rank_crash", "severity": Severity.CRITICAL, "culprit": Culprit("rank", "node-17", rank=5)}
    return incident(id, **{**said, "summary": "rank 5 died of SIGSEGV", **changes})


def cards(*known: Incident) -> Structure:
    return Structure(open_card(Listing(known, WALL + 60, "node-17")).encode())


def test_equal_incidents_are_one_row() -> None:
    """With the number of GPUs and which; each is a link away. Graver ones come first."""
    found = cards(*(throttled(gpu) for gpu in (7, 0, 1, 2, 5)), crash())
    assert [tag for tag, _ in found.tags].count("summary") == 2
    assert "A GPU is throttled: 5 GPUs (0–2, 5, 7)" in found.text
    assert found.text.index("rank 5 died") < found.text.index("5 GPUs")
    links = [str(a["href"]) for tag, a in found.tags if tag == "a" and "/incident/throttle" in str(a["href"])]
    assert links == [f"/incident/throttle-{gpu}" for gpu in (0, 1, 2, 5, 7)]


def test_an_open_incident_says_who_acts_and_with_what() -> None:
    """Before its evidence, on every page that lists it; one of a group names the first. One that is over does not."""
    hot = throttled(3, evidence=(Evidence("as hot as that", "driver", WALL),), cost=Cost(text="a tenth"))
    text = re.sub(r"\s+", " ", cards(hot).text)
    told = brief(hot, "observe", "node-17")
    order = ("GPU 3 is throttled", "a tenth", told.acts, told.command, "as hot as that")
    assert [*map(text.index, order)] == sorted(map(text.index, order))
    group = cards(throttled(4), throttled(5))
    assert ("pre", {"class": "command"}) in group.tags and brief(
        throttled(4), "observe", "node-17"
    ).command in group.text
    over = replace(hot, resolved_at=WALL + 9, state=State.RESOLVED)
    assert "Who acts" not in Structure(ended_card(Listing([over], WALL + 60, "node-17")).encode()).text


def test_what_differs_in_what_matters_stays_apart() -> None:
    """Severity, kind, and whether it is over."""
    first = throttled(0)
    for other in (
        throttled(1, severity=Severity.CRITICAL),
        throttled(1, resolved_at=WALL, state=State.RESOLVED), throttled(1, kind="gpu_ecc"),
    ):  # fmt: skip
        assert len(grouped([first, other])) == 2
    assert len(grouped([first, throttled(1, state=State.ESCALATED)])) == 1


def test_equal_incidents_of_several_runs_are_one_row_that_names_them() -> None:
    """A rank's number means nothing without its run."""
    members = [crash(run, run=run, culprit=Culprit("rank", "node-17", rank=5)) for run in ("a", "b")]
    found = cards(*members)
    assert [tag for tag, _ in found.tags].count("summary") == 1
    assert "2 incidents of 2 runs" in found.text and "rank 5 of a, rank 5 of b" in found.text
    assert {"/job/a", "/job/b"} <= {str(a["href"]) for tag, a in found.tags if tag == "a"}
    assert "2 ranks (4–5)" in cards(*(crash(f"{n}", culprit=Culprit("rank", "n", rank=n)) for n in (4, 5))).text


def test_the_page_has_all_of_it() -> None:
    """What happened when, in order; evidence with its source, similar past ones, links to job and run, the runbook."""
    told = {"verb": "notify", "target": "", "outcome": "ok", "at": WALL + 1, "ended_at": WALL + 2}
    root = crash(
        job="4242", run="train", evidence=(Evidence("Xid 31 on GPU 5", "kernel log", WALL - 9),),
        opened_at=WALL, actions=(told,),
    )  # fmt: skip
    symptom = incident("symptom", cause="crash", summary="rank 1 waits", opened_at=WALL + 3)
    past = crash("past", summary="rank 2 died of SIGSEGV", opened_at=WALL - 9000, resolved_at=WALL - 8000)
    shown = snapshot(incidents=(root, symptom), ended=(past,))
    assert [moment.what for moment in timeline(root, [symptom])] == [
        "seen by kernel log", "opened", "action", "action ended", "symptom"
    ]  # fmt: skip
    found = Structure(incident_page(shown, root, "node-17"))
    text = re.sub(r"\s+", " ", found.text)
    for said in ("Xid 31 on GPU 5", "kernel log", "rank 1 waits", "rank 2 died", "What opsd does by itself", "notify"):
        assert said in text
    links = {a["href"] for tag, a in found.tags if tag == "a"}
    assert {"/job/4242", "/job/train", "/incident/symptom", "/incident/past", "/runbooks/rank_crash"} <= links
    below = Structure(incident_page(shown, symptom, "node-17"))
    assert "/incident/crash" in {a["href"] for tag, a in below.tags if tag == "a"}


def test_an_incident_that_is_over_says_when_and_how() -> None:
    """After a relapse as well; a kind of another release has no runbook here."""
    over = crash(
        kind="of_the_future", resolved_at=WALL + 90, state=State.RESOLVED, verdict="over by itself",
        relapses=2, reopened_at=WALL + 30,
    )  # fmt: skip
    assert [m.what for m in timeline(over, ())][-2:] == ["came back", "over"]
    text = re.sub(r"\s+", " ", Structure(incident_page(snapshot(ended=(over,)), over, "node-17")).text)
    assert "lasted 90 s" in text and "over by itself" in text and "None is remembered" in text


def test_an_incident_that_is_over_has_cost_what_it_did_in_all() -> None:
    """The share of the last moment, as the trouble faded, is no longer true; what is no share remains."""
    cost = Cost(0.0, 1800.0, "job 4242 loses less than 1% (16 GPUs, measured)", gpus=16)
    known = incident(cost=cost)
    assert cost_now(known) == f"{cost.text}; 0.50 GPU-hours so far"
    assert cost_now(replace(known, resolved_at=WALL + 60)) == "0.50 GPU-hours altogether"
    assert cost_now(replace(known, cost=replace(cost, gpus=0), resolved_at=WALL + 60)) == (
        f"{cost.text}; 0.50 GPU-hours altogether"
    )
    assert cost_now(incident(cost=Cost(gpu_seconds=84.0))) == "84 GPU-seconds so far"


def test_it_is_found_by_its_id_only() -> None:
    """Whatever is in an id, the link leads to its page; an unknown one has none."""
    odd = crash("crash/../a b")
    app = App(lambda: snapshot(incidents=(odd,)), {"node": "node-17"}, stale_s=5.0)
    status, body, headers = app(Request(incident_path(odd), {}))
    assert status == 200 and b"rank 5 died" in body and "default-src 'none'" in headers["Content-Security-Policy"]
    assert app(Request("/incident/crash", {}))[0] == 404 and app(Request("/incident/", {}))[0] == 404


def test_what_was_written_into_it_has_no_effect() -> None:
    """Script in any of its texts is text."""
    hostile = crash(
        HOSTILE, kind=HOSTILE, summary=HOSTILE, verdict=HOSTILE, job=HOSTILE, run=HOSTILE,
        evidence=(Evidence(HOSTILE, HOSTILE, WALL),), culprit=Culprit(HOSTILE, HOSTILE, detail=HOSTILE),
        actions=({"verb": HOSTILE, "target": HOSTILE, "outcome": HOSTILE, "at": WALL, "reason": HOSTILE},),
    )  # fmt: skip
    shown = snapshot(incidents=(hostile, incident("s", cause=HOSTILE, summary=HOSTILE)))
    listing = Listing([hostile, hostile], WALL, HOSTILE)
    for page in (incident_page(shown, hostile, HOSTILE), open_card(listing).encode()):
        found = Structure(page)
        assert not {tag for tag, _ in found.tags} & {"script", "img"}
        assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
