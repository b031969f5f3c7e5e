"""The prediction of a failing fan beats the noise of temperatures: fifty healthy nodes, and fans that really fail."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import pytest

from opsd.runbooks.fan_failing import OPEN_AFTER_S, RUNBOOK
from tests.fakes.noise import MODELS, Fault, Noise, Tracks, gpu_node

LOOK_S = 10
HOURS = 72.0


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


def test_what_others_wander_is_seen_where_they_are_seldom_settled() -> None:
    """Loads and temperatures that wander for minutes: one GPU climbs 6 K, while its peers have few blocks alike."""
    noise = Noise(ar_sd=2.2, ar_s=200.0, load_sd=33.0, load_s=200.0)
    assert opened(gpu_node(noise, 509), 700) is None


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
@pytest.mark.parametrize(
    "noise", [Noise(), Noise(step=1.0), Noise(peers=4)], ids=["quiet", "whole degrees", "four GPUs"]
)
def test_a_fan_that_fails_is_found(noise: Noise, fault: Fault, within_s: float) -> None:
    """Within minutes, on a node with the usual noise."""
    at = opened(gpu_node(noise, 1, fault), 300 + int(within_s))
    assert at is not None and at >= 300
