"""What is seen of the agent from outside: its scrapes, its memory, and what it tells people."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LIMIT_S = 10.0
"""Seconds after which a scrape is given up."""


@dataclass
class Observed:
    """Seconds since the start with resident MiB, seconds of each scrape, and what the last whole scrape said.

    ``unanswered`` are the seconds at which a scrape was not answered with all of a page. ``stale_s`` is the longest age
    of the newest evaluation of any run that ``fresh`` names.
    """

    memory: list[tuple[float, float]] = field(default_factory=list)
    scrapes: list[float] = field(default_factory=list)
    unanswered: list[float] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    stale_s: float = 0.0


class Scraper:
    """Asks the agent at ``port``, process ``pid``, once a second, as Prometheus does: a connection for each scrape."""

    def __init__(self, port: int, pid: int, fresh: Sequence[str]) -> None:
        self.seen = Observed()
        self._port, self._pid, self._fresh = port, pid, fresh
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> Observed:
        """End, and return what was seen."""
        self._stop.set()
        self._thread.join()
        return self.seen

    def _work(self) -> None:
        second = 0
        while not self._stop.is_set():
            at = time.monotonic() - self._began
            self.seen.memory.append((at, resident_mib(self._pid)))
            before = time.perf_counter()
            page = scrape(self._port)
            if page is None:
                self.seen.unanswered.append(at)
            else:
                self.seen.scrapes.append(time.perf_counter() - before)
                self._take(page)
            second += 1
            self._stop.wait(max(0.0, self._began + second - time.monotonic()))

    def _take(self, page: str) -> None:
        self.seen.last = series(page)
        for run in self._fresh:
            written = self.seen.last.get(f'opsd_evaluation_step{{run="{run}"}}')
            if written is not None:
                self.seen.stale_s = max(self.seen.stale_s, time.monotonic() - written)


def scrape(port: int) -> str | None:
    """The page of metrics, None if not all of it came within ``LIMIT_S``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})
        answer = connection.getresponse()
        page = answer.read().decode()
        return page if answer.status == 200 and page.endswith("# EOF\n") else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def series(page: str) -> dict[str, float]:
    """Value of each series by its text, labels included; an exemplar is no part of it."""
    lines = (line.partition(" # ")[0].rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def total(values: dict[str, float], name: str, *labels: str) -> float:
    """The sum of the series of ``name`` that have all ``labels``, as they stand in the text."""
    found = (value for one, value in values.items() if one.partition("{")[0] == name and all(x in one for x in labels))
    return sum(found)


def highest_mib(pid: int) -> float:
    """The most memory that the process has had, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def inbox() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The URL of a webhook, and the notifications that it has got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", got
    finally:
        server.shutdown()
        server.server_close()
