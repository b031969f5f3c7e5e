"""Fifty concurrent scrapers: response time and CPU, beside nvitop-exporter on the same simulated driver.

A pair of Prometheus servers and a few open web pages are five clients; fifty is what an incident may bring.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from opsd.bench.agent import Exporter, node, nvitop, ours

SCRAPERS = 50
ROUNDS = 20
SPREAD_S = 15
"""For the CPU time: each scraper asks once a second for this long, at its own time within the second."""
TIMEOUT_S = 5.0
"""A scrape that takes longer has failed, and counts as this long."""
_HEADERS = "Host: localhost\r\nAccept: application/openmetrics-text;version=1.0.0\r\nAccept-Encoding: gzip\r\n"


def run() -> dict[str, float | int | str]:
    """Percentiles in milliseconds of answers to all scrapers at the same instant, and CPU in percent of one core.

    ``*_failed`` is the share of simultaneous scrapes without an answer, among them connections that an exporter did not
    accept. Percentiles are of the worst case, CPU of the usual one. The scrapers are threads of this process, whose own
    time is included in the figures of both exporters.
    """
    with node() as place, ExitStack() as stack:
        exporters = [stack.enter_context(ours(place)), *stack.enter_context(nvitop(place))]
        results: dict[str, float | int | str] = {"scrapers": SCRAPERS}
        for exporter in exporters:
            results |= _at_once(exporter, "/metrics", f"{exporter.name}_metrics")
            results[f"{exporter.name}_cpu_percent"] = _cpu_percent(exporter)
        results |= _at_once(exporters[0], "/", "ours_page")
        if len(exporters) > 1:
            ours_p99, theirs = results["ours_metrics_p99_ms"], results["nvitop_metrics_p99_ms"]
            results["ratio_metrics_p99"] = float(ours_p99) / float(theirs)
        return results


def _at_once(exporter: Exporter, path: str, name: str) -> dict[str, float]:
    start = threading.Barrier(SCRAPERS)

    def scrape(_number: int, _round: int) -> None:
        start.wait()

    taken = _scrapes(exporter.port, path, ROUNDS, scrape)
    cuts = statistics.quantiles(taken, n=100)
    failed = sum(seconds >= TIMEOUT_S for seconds in taken) / len(taken)
    return {f"{name}_p50_ms": cuts[49] * 1e3, f"{name}_p99_ms": cuts[98] * 1e3, f"{name}_failed": failed}


def _cpu_percent(exporter: Exporter) -> float:
    began, before = time.monotonic(), exporter.cpu_s()

    def scrape(number: int, second: int) -> None:
        time.sleep(max(0.0, began + second + number / SCRAPERS - time.monotonic()))

    _scrapes(exporter.port, "/metrics", SPREAD_S, scrape)
    return 100 * (exporter.cpu_s() - before) / (time.monotonic() - began)


def _scrapes(port: int, path: str, rounds: int, wait: Callable[[int, int], None]) -> list[float]:
    """Seconds of each answer; ``wait`` blocks until it is the turn of this scraper and round."""
    taken: list[float] = []

    def scraper(number: int) -> None:
        for round in range(rounds):
            wait(number, round)
            taken.append(_answer_s(port, path))

    threads = [threading.Thread(target=scraper, args=(number,)) for number in range(SCRAPERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def _answer_s(port: int, path: str) -> float:
    began = time.perf_counter()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\n{_HEADERS}Connection: close\r\n\r\n".encode())
            answer = connection.recv(1 << 20)
            while connection.recv(1 << 20):
                pass
    except OSError:
        return TIMEOUT_S
    return time.perf_counter() - began if b" 200 " in answer[:20] else TIMEOUT_S
