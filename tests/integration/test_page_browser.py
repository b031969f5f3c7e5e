"""The pages in a real browser: they fit a phone, are accessible, and nothing on them is refused by their own policy."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opsd.agent.loop import Snapshot
from opsd.agent.web.app import App, Request
from opsd.agent.web.fleet import Answer, Fleet, NodeSummary
from opsd.agent.web.history import History
from opsd.agent.web.ledgers import LedgerResult, Ledgers
from opsd.agent.web.server import Server
from opsd.collectors.base import StepFact
from opsd.plan.forecast import HABITS
from opsd.plan.hardware import hardware_of
from opsd.plan.plan import plan_for_gpus
from opsd.report.page import compare_page, plan_page, report_page
from opsd.report.run import Price, read_run
from opsd.report.study import study_page
from opsd.runbooks.base import Culprit, Severity
from opsd.slurm.port import Node
from tests.fakes.clock import eventually
from tests.fakes.collectors import SILENT
from tests.fakes.incidents import WALL, incident
from tests.fakes.plans import run_of
from tests.fakes.slurm import FakeSlurm
from tests.fakes.studies import large_report
from tests.unit.test_page import gpu, rank, run, samples, snapshot
from tests.unit.test_page_fleet import told
from tests.unit.test_page_job import LEDGER, speeds
from tests.unit.test_report import EVENTS, STEPS, T, event
from tests.unit.test_report import write as write_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="chromium (Debian package chromium) is not installed"),
    pytest.mark.slow,
]
DESKTOP, PHONE = (1440, 900), (390, 844)
LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"
PAGES = {"node": "/", "job": "/job/4242", "incident": "/incident/crash", "fleet": "/fleet"}
LOOKS = {"desktop": (DESKTOP, LIGHT), "phone": (PHONE, DARK)}
LONG = "GPU 3 is throttled by hw_thermal and by a very long list of reasons that goes on and on"
MEASURE = """
(async () => {
  const wide = [document.documentElement.scrollWidth, innerWidth];
  const whole = [...document.querySelectorAll(".sentences, .stack, .fits")];
  const cut = whole.filter(e => e.scrollWidth > e.clientWidth).length;
  const found = window.axe ? (await axe.run({resultTypes: ["violations"]})).violations : null;
  const said = found && found.map(v => [v.id, v.nodes.map(n => n.html.slice(0, 200) + n.failureSummary)]);
  parent.postMessage([window.name, {wide, cut, said}], "*");
})()
"""
COLLECT = """
<!doctype html><title>{}</title>
<script>
const found = {};
onmessage = told => { found[told.data[0]] = told.data[1]; document.title = JSON.stringify(found); }
</script>
"""


def axe() -> str:
    """The program that finds what a screen reader cannot read; "" if it is not installed."""
    spec = importlib.util.find_spec("axe_core_python")
    packaged = Path(spec.origin).parent / "axe.min.js" if spec and spec.origin else Path("missing")
    file = Path(os.environ.get("OPSD_AXE", packaged))
    return file.read_text() if file.exists() else ""


def node() -> tuple[Snapshot, History]:
    history = History()
    for point in range(60):
        seen = samples(8, point / 3, 60 + point % 7)
        history.note(replace(snapshot(1000.0 + 10 * point, samples=(seen,)), wall=WALL + 10 * (point - 60)))
    steps = tuple(StepFact(n, 999.0, 0.5, 1, 2.0, 1.0, {"forward": 0.1, "backward": 0.3}) for n in range(100, 140))
    crash = incident("crash", kind="rank_crash", severity=Severity.CRITICAL, summary="rank 5 died", run="train")
    hot = [
        incident(f"hot-{n}", kind="gpu_throttle", summary=LONG, culprit=Culprit("gpu", "node-17", n)) for n in range(8)
    ]
    whole = snapshot(
        time.monotonic(), gpus=[gpu(i) for i in range(8)], ranks=[rank(i, steps=steps) for i in range(8)],
        samples=(samples(8, 10.0), speeds("train", range(8))), incidents=(crash, *hot),
        ended=(replace(crash, id="past", resolved_at=WALL - 100),),
        runs=[run(), run("a-run-with-quite-a-long-name-2026-11-21", job="", state="finished", alive=False)],
    )  # fmt: skip
    return whole, history


def cluster() -> Fleet:
    """Thirty other nodes, of which some are ill."""

    def ask(name: str, _: str) -> Answer[NodeSummary]:
        if name == "node-3":
            return Answer(name, "http://node-3:9477", problem="does not answer: timed out")
        ill = {"incidents": {"critical": 1}, "worst": LONG, "gpus_lost": 1} if name == "node-4" else {}
        return told(name, **ill, spare=True if name == "node-5" else None)

    nodes = [Node(f"node-{n}", "idle", frozenset({"drain"} if n == 4 else ()), "opsd: gpu_lost") for n in range(3, 33)]
    fleet = Fleet("node-17", lambda: FakeSlurm(nodes), ask)
    assert eventually(lambda: bool(fleet.view().others.answers))
    return fleet


def application() -> App:
    shown, history = node()
    curve = [[WALL - 6000 + 60 * n, 8.0 / (1 + n / 10)] for n in range(100)]
    ledgers = Ledgers(lambda _folder, _user: LedgerResult({**LEDGER, "curves": {"loss": curve, "step_s": curve}}))
    assert eventually(lambda: ledgers.of(shown.runs[0]).ledger is not None)
    facts = {"node": "node-17", "mode": "observe"}
    return App(lambda: shown, facts, stale_s=1e9, history=history, ledgers=ledgers, fleet=cluster())


@pytest.fixture(scope="module")
def app() -> App:
    return application()


@pytest.fixture(scope="module")
def url(app: App) -> Iterator[str]:
    server = Server("127.0.0.1:0", SILENT)
    server.start(app)
    yield f"http://{server.address}"
    server.close()


def browse(url: str, size: tuple[int, int], folder: Path, *options: str) -> str:
    """What the browser prints for a page in a window of ``size``."""
    assert BROWSER is not None
    arguments = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}/profile",
        f"--window-size={size[0]},{size[1]}", "--enable-logging=stderr", "--v=0", *options, url,
    ]  # fmt: skip
    done = subprocess.run([BROWSER, *arguments], capture_output=True, text=True, timeout=90, check=False)
    assert "Content Security Policy" not in done.stderr
    return done.stdout


def png_size(file: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", file.read_bytes()[16:24])
    return width, height


LATER = pytest.mark.long


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    "page", ["node", "job", pytest.param("incident", marks=LATER), pytest.param("fleet", marks=LATER)]
)
def test_a_browser_shows_it(url: str, page: str, look: str, tmp_path: Path) -> None:
    """With its style, its lines and its icon, light and dark; the picture is kept where OPSD_SCREENSHOTS says."""
    size, scheme = LOOKS[look]
    folder = Path(os.environ.get("OPSD_SCREENSHOTS", tmp_path))
    picture = folder / f"{page}-{size[0]}-{'dark' if scheme == DARK else 'light'}.png"
    browse(url + PAGES[page], size, tmp_path, scheme, f"--screenshot={picture}")
    assert png_size(picture) == size
    assert picture.stat().st_size > 20_000


def measured(pages: Mapping[str, bytes], scheme: str, folder: Path) -> dict[str, Any]:
    """What copies of the ``pages`` in frames of both sizes say of themselves, by page and width of the frame.

    That is their width, and what axe finds, None without axe.
    """
    script = f"<script src=axe.js></script><script>{MEASURE}</script>"
    (folder / "axe.js").write_text(axe())
    frames = ""
    for page, content in pages.items():
        (folder / f"{page}.html").write_bytes(_with_scripts(content) + script.encode())
        frames += "".join(
            f"<iframe name='{page} {wide}' src='{page}.html' width={wide} height={high} style='border:0'></iframe>"
            for wide, high in (DESKTOP, PHONE)
        )
    (folder / "all.html").write_text(COLLECT + frames)
    shown = browse((folder / "all.html").as_uri(), DESKTOP, folder, scheme, "--dump-dom", "--virtual-time-budget=60000")
    title = re.search(r"<title>(.*?)</title>", shown, re.DOTALL)
    assert title is not None, shown[:500]
    found: dict[str, Any] = json.loads(html.unescape(title[1]))
    assert len(found) == 2 * len(pages)
    return found


def _with_scripts(page: bytes) -> bytes:
    """The page of a file, whose own policy would refuse what measures it."""
    return re.sub(rb'<meta http-equiv="Content-Security-Policy"[^>]*>', b"", page)


def reports(folder: Path) -> dict[str, bytes]:
    """The pages that commands write, with messages, names and tables as long as they come."""
    error = {"type": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError", "message": f"{LONG} " * 3}
    events = [
        *({**e, "error": {**error, "where": "t.py:1"}} if e.get("error") else e for e in EVENTS),
        event(9.7, "straggler_found", rank=3, ranks=[3], culprit_nodes=["n1"], gpus=[3], cause="slow GPU",
              slowdown=1.3, confidence=0.9, evidence=[LONG], advice="", source="gpu", step=5, compared=16),
    ]  # fmt: skip
    write_run(folder, events, [{**line, "tokens_per_s": 100.0} for line in STEPS])
    loads = {"t": T, "generation": 1, "step": 200, "steps": 100, "first_layer": 1, "loads": [[10] * 64, [1] * 64]}
    (folder / "experts.jsonl").write_text(json.dumps(loads) + "\n")
    scores = {f"a_benchmark_with_a_long_name_{n}": {"accuracy": 0.5} for n in range(9)}
    lines = [{"t": T + s, "event": "evaluation", "step": s, "results": scores} for s in (10, 20)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run, config = read_run(folder), run_of("smollm3-3b")
    planned = plan_for_gpus(config, "h100", 384, 1e12, hardware_of("h100", config.model.dtype), HABITS)
    pages = {
        "report": report_page(run, Price(2.0)),
        "compare": compare_page(run, run, Price(2.0)),
        "plan": plan_page(planned, "smollm3-3b"),
        "study": study_page(large_report(folder)),
    }
    assert "a_benchmark_with_a_long_name_1.accuracy" in pages["report"] and "Finding" in pages["report"]
    return {name: page.encode() for name, page in pages.items()}


@pytest.mark.parametrize("scheme", [pytest.param(LIGHT, marks=LATER, id="light"), pytest.param(DARK, id="dark")])
def test_they_fit_and_everybody_can_read_them(app: App, scheme: str, tmp_path: Path) -> None:
    """Only tables scroll sideways, by themselves, none of sentences; axe-core, where it is installed, finds nothing."""
    pages = {page: app(Request(path, {}))[1] for page, path in PAGES.items()}
    missing = app(Request("/incident/none", {}, "text/html"))[1]
    found = measured({**pages, "missing": missing, **reports(tmp_path)}, scheme, tmp_path)
    assert {page: said["wide"] for page, said in found.items() if said["wide"][0] > said["wide"][1]} == {}
    assert {page: said["cut"] for page, said in found.items() if said["cut"]} == {}
    assert {page: said["said"] for page, said in found.items() if said["said"]} == {}


def test_the_browser_reads_what_was_written(url: str, tmp_path: Path) -> None:
    """The document that the browser has built holds the incidents, and no script has run in it."""
    document = html.unescape(browse(url, DESKTOP, tmp_path, "--dump-dom"))
    assert "A GPU is throttled: 8 GPUs (0–7)" in document
    assert "<title>node-17 – opsd</title>" in document
