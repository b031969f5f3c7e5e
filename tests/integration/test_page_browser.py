"""The page in a real browser: it fits a phone, and nothing on it is refused by its own security policy."""

from __future__ import annotations

import html
import os
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.agent.loop import Snapshot
from opsd.agent.web.app import App, Request
from opsd.agent.web.history import History
from opsd.agent.web.ledgers import LedgerResult, Ledgers
from opsd.agent.web.server import Server
from tests.fakes.agent import SILENT
from tests.fakes.incidents import incident
from tests.unit.test_page import gpu, rank, run, samples, snapshot
from tests.unit.test_page_job import LEDGER, speeds

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="chromium (Debian package chromium) is not installed"),
    pytest.mark.slow,
]
DESKTOP, PHONE = (1280, 900), (360, 800)
LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"
PAGES = {"node": "/", "job": "/job/4242"}
LONG = "GPU 3 is throttled by hw_thermal and by a very long list of reasons that goes on and on"
MEASURE = "<script>document.title=document.documentElement.scrollWidth+' '+innerWidth</script>"


def node() -> tuple[Snapshot, History]:
    history = History(every_s=1.0)
    for second in range(30):
        history.note(snapshot(1000.0 + second, samples=(samples(8, second / 3, 60 + second % 7),)))
    whole = snapshot(
        time.monotonic(), gpus=[gpu(i) for i in range(8)], ranks=[rank(i) for i in range(8)],
        samples=(samples(8, 10.0), speeds("train", range(8))), incidents=(incident(summary=LONG, job="4242"),),
        runs=[run(), run("a-run-with-quite-a-long-name-2026-11-21", job="")],
    )  # fmt: skip
    return whole, history


def application() -> App:
    shown, history = node()
    ledgers = Ledgers(lambda _folder, _user: LedgerResult(LEDGER))
    for _ in range(100):
        if ledgers.of(shown.runs[0]).ledger:
            break
        time.sleep(0.01)
    facts = {"node": "node-17", "mode": "observe"}
    return App(lambda: shown, facts, stale_s=1e9, history=history, ledgers=ledgers)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Server("127.0.0.1:0", SILENT)
    server.start(application())
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


@pytest.mark.parametrize(
    ("page", "size", "scheme"),
    [("node", DESKTOP, LIGHT), ("node", PHONE, DARK), ("job", DESKTOP, DARK), ("job", PHONE, LIGHT)],
    ids=["node-desktop-light", "node-phone-dark", "job-desktop-dark", "job-phone-light"],
)
def test_a_browser_shows_it(url: str, page: str, size: tuple[int, int], scheme: str, tmp_path: Path) -> None:
    """With its style and its lines, light and dark; the picture is kept where OPSD_SCREENSHOTS says."""
    folder = Path(os.environ.get("OPSD_SCREENSHOTS", tmp_path))
    picture = folder / f"{page}-{size[0]}-{'dark' if scheme == DARK else 'light'}.png"
    browse(url + PAGES[page], size, tmp_path, scheme, f"--screenshot={picture}")
    assert png_size(picture) == size
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_never_scrolls_sideways(size: tuple[int, int], tmp_path: Path) -> None:
    """Only its tables do, each by itself. Copies of the pages measure themselves."""
    app = application()
    for page, path in PAGES.items():
        _, body, _ = app(Request(path, {}))
        copy = tmp_path / f"{page}.html"
        copy.write_bytes(body + MEASURE.encode())
        found = re.search(r"<title>(\d+) (\d+)</title>", browse(copy.as_uri(), size, tmp_path, "--dump-dom"))
        assert found is not None
        assert int(found[1]) <= int(found[2]), page


def test_the_browser_reads_what_was_written(url: str, tmp_path: Path) -> None:
    """The document that the browser has built holds the incident, and no script has run in it."""
    document = html.unescape(browse(url, DESKTOP, tmp_path, "--dump-dom"))
    assert "GPU 3 is throttled by hw_thermal" in document
    assert "<title>node-17 – opsd</title>" in document
