"""The pages of agents: a node, a job, an incident, all nodes."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Final

from PIL import Image

from opsd.agent.web.app import App
from opsd.agent.web.fleet import Answer, Fleet, NodeSummary
from opsd.slurm.port import Node
from opsd.stack.world import JOB, eventually, get
from tests.fakes.slurm import FakeSlurm
from tests.pictures.browser import PictureError, Scheme, take
from tests.unit.test_page import gpu, rank, run, samples, snapshot
from tests.unit.test_page_fleet import told

DESKTOP: Final = (1440, 1000)
PHONE: Final = (390, 844)
MAX_BYTES: Final = 200_000
COLOURS: Final = 160
LEDGER_S, COMMAND_S = 60.0, 30.0
LOOKS: Final[tuple[tuple[str, tuple[int, int], Scheme], ...]] = (("", DESKTOP, "light"), ("-phone", PHONE, "dark"))


def pictures(agent: str, fleet: str, folder: Path) -> list[Path]:
    """Take the pages of the ``agent``, and of one that knows a ``fleet``. Raises PictureError."""

    def has_ledger() -> bool:
        with urllib.request.urlopen(f"{agent}/job/{JOB}", timeout=10) as answer:  # loopback
            return b"ETTR" in answer.read()

    if not eventually(has_ledger, LEDGER_S):
        raise PictureError(f"the page of job {JOB} has no ledger after {LEDGER_S:.0f} s")
    taken = []
    for name, url in _pages(agent, fleet):
        for suffix, size, scheme in LOOKS:
            file = folder / f"{name}{suffix}.png"
            take(url, file, size, scheme)
            taken.append(smaller(file))
    return taken


def _pages(agent: str, fleet: str) -> list[tuple[str, str]]:
    incidents = get(f"{agent}/api/v1/incidents")["incidents"]
    throttles = [incident["id"] for incident in incidents if incident["kind"] == "gpu_throttle"]
    if not throttles:
        raise PictureError(f"no GPU of {agent} was throttled")
    pages = [("node", "/"), ("job", f"/job/{JOB}"), ("incident", f"/incident/{throttles[0]}")]
    return [*((name, agent + path) for name, path in pages), ("fleet", f"{fleet}/fleet")]


def fleet() -> App:
    """The application of an agent that knows 24 made-up nodes, of which one is drained and one does not answer."""
    names = [f"node-{n}" for n in range(10, 34)]

    def ask(name: str, _: str) -> Answer[NodeSummary]:
        if name == "node-21":
            return Answer(name, f"http://{name}:9477", problem="does not answer")
        lost = {"incidents": {"critical": 1}, "worst": "GPU 2 is lost", "gpus_lost": 1} if name == "node-13" else {}
        return told(name, **lost, spare=True if name in ("node-32", "node-33") else None)

    def slurm(name: str) -> Node:
        drained = name == "node-13"
        flags, reason = (frozenset({"drain"}), "opsd: gpu_lost") if drained else (frozenset(), "")
        return Node(name, "idle" if name in ("node-13", "node-32", "node-33") else "allocated", flags, reason)

    known = Fleet("node-17", lambda: FakeSlurm([slurm(name) for name in names]), ask)
    if not eventually(lambda: bool(known.view().others.answers), COMMAND_S):
        raise PictureError("the nodes were not asked")
    whole = snapshot(
        0.0, gpus=[gpu(i) for i in range(8)], ranks=[rank(i) for i in range(8)], samples=(samples(8, 10.0),),
        runs=[run()],
    )  # fmt: skip
    facts = {"node": "node-17", "mode": "observe"}
    return App(lambda: replace(whole, at=time.monotonic()), facts, stale_s=1e9, fleet=known)


def smaller(file: Path, scale: float = 1.0, method: Image.Quantize = Image.Quantize.MEDIANCUT) -> Path:
    """Reduce a picture to a palette chosen by ``method``, and to ``scale`` of its size.

    Raises PictureError if it is large all the same.
    """
    with Image.open(file) as picture:
        drawn = picture.convert("RGB")
    if scale != 1.0:
        drawn = drawn.resize((round(drawn.width * scale), round(drawn.height * scale)), Image.Resampling.LANCZOS)
    drawn.quantize(COLOURS, method, dither=Image.Dither.NONE).save(file, optimize=True)
    if file.stat().st_size > MAX_BYTES:
        raise PictureError(f"{file} has {file.stat().st_size} bytes, more than {MAX_BYTES}")
    return file
