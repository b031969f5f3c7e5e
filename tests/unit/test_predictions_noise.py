"""Predictions beat the noise of what they watch: fifty healthy nodes, and fans that really fail."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import islice

import pytest

from opsd.runbooks import RUNBOOKS
from opsd.runbooks.fan_failing import OPEN_AFTER_S, RUNBOOK
from tests.fakes.noise import MODELS, Fault, Noise, Tracks, ar1, drive_series, gpu_node

LOOK_S = 10
HOURS = 72.0
BOOKS = {book.kind: book for book in RUNBOOKS}


def opened(node: Iterator[Tracks], seconds: int) -> float | None:
    """The second at which the incident opens: once the fan is found failing for long enough without a break."""
    since = None
    for view in islice(node, seconds):
        if view.now % LOOK_S:
            continue
        since = (view.now if since is None else since) if list(RUNBOOK.detect(view)) else None
        if since is not None and view.now - since >= OPEN_AFTER_S:
            return view.now
    return None


@pytest.mark.parametrize("number", [0, 10, 18, 32, 40, 46])
def test_a_noisy_node_has_no_failing_fan(number: int) -> None:
    """A quarter of an hour of some of the fifty; all of them for 72 hours is a long test."""
    assert opened(gpu_node(MODELS[number], number), 900) is None


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_fifty_noisy_nodes_have_no_failing_fan_in_72_hours(number: int) -> None:
    """AR(1) noise, walking and changing loads, warm rooms, whole degrees, missing and wild samples."""
    assert opened(gpu_node(MODELS[number], 300 + number), int(HOURS * 3600 / len(MODELS))) is None


def ramp(celsius_a_minute: float) -> Fault:
    """GPU 2 becomes hotter from second 300 on."""
    return lambda gpu, second: max(0.0, second - 300.0) / 60.0 * celsius_a_minute if gpu == 2 else 0.0


def stop(celsius: float, seconds: float) -> Fault:
    """The fan of GPU 2 stops at second 300."""
    return lambda gpu, second: celsius * (1.0 - math.exp(-max(0.0, second - 300.0) / seconds)) if gpu == 2 else 0.0


@pytest.mark.parametrize(
    ("fault", "within_s"),
    [(ramp(2.0), 480), (ramp(1.0), 660), (stop(18.0, 150.0), 420)],
    ids=["two degrees a minute", "one degree a minute", "stopped"],
)
@pytest.mark.parametrize("noise", [Noise(), Noise(step=1.0)], ids=["quiet", "whole degrees"])
def test_a_fan_that_fails_is_found(noise: Noise, fault: Fault, within_s: float) -> None:
    """Within minutes, on a node with the usual noise."""
    at = opened(gpu_node(noise, 1, fault), 300 + int(within_s))
    assert at is not None and at >= 300


RANK = {"UUID": "GPU-0", "gpu": "0", "type": "corrected", "counter": "volatile"}
PORT = {"device": "mlx5_0", "port": "1", "error": "symbol_error"}


def arrivals(rng: random.Random, a_minute: float) -> Iterator[float]:
    """A counter of errors that come at random, so many a minute on average."""
    total = 0.0
    while True:
        total += rng.random() < a_minute / 60.0
        yield total


@pytest.mark.parametrize("a_minute", [0.2, 1.0, 3.0, 8.0, 20.0])
def test_memory_errors_that_come_at_random_are_no_trend(a_minute: float) -> None:
    """However many a healthy GPU corrects, no growth is foreseen."""
    book, rng = BOOKS["gpu_ecc_trend"], random.Random(7)
    node = drive_series(Tracks(), "opsd_gpu_ecc_errors_total", arrivals(rng, a_minute), 3 * 3600, **RANK)
    assert [view.now for view in node if view.now % LOOK_S == 0 and list(book.detect(view))] == []


@pytest.mark.parametrize("a_minute", [0.05, 0.5])
def test_bit_errors_below_the_rate_that_counts_are_no_failing_port(a_minute: float) -> None:
    """A healthy link has some, at random times."""
    book, rng = BOOKS["nic_degrading"], random.Random(7)
    node = drive_series(Tracks(), "opsd_ib_errors_total", arrivals(rng, a_minute), 3 * 3600, **PORT)
    found = [view.now for view in node if view.now % LOOK_S == 0 and list(book.detect(view))]
    assert found == []


@pytest.mark.parametrize("correlation_s", [0.0, 10.0, 60.0, 300.0])
@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_latencies_that_wander_are_no_slow_storage(correlation_s: float, spread: float) -> None:
    """Log-normal latencies of a disk that is used."""
    book, noise = BOOKS["storage_slow"], ar1(random.Random(3), spread, correlation_s)
    values = (0.0004 * math.exp(value) for value in noise)
    node = drive_series(Tracks(), "opsd_storage_io_latency_seconds", values, 3600, device="nvme0n1", op="read")
    assert [view.now for view in node if view.now % LOOK_S == 0 and list(book.detect(view))] == []
