"""Predictions from counters, wear, space and latencies beat their noise, and find what really grows."""

from __future__ import annotations

import pytest

from opsd.runbooks import RUNBOOKS
from tests.fakes import noisy_series as series
from tests.fakes.noisy_series import HOURS, MODELS, Healthy, opened

BOOKS = {book.kind: book for book in RUNBOOKS}
HEALTHY: dict[str, Healthy] = {
    "gpu_ecc_trend": series.memory_errors,
    "nic_degrading": series.link_errors,
    "nvme_failing": series.drive,
    "storage_full": series.disk,
    "storage_slow": series.latencies,
}
LOOK_S = 30.0
ECC = ("opsd_gpu_ecc_errors_total", {"UUID": "GPU-0", "gpu": "0", "type": "corrected", "counter": "volatile"})
PORT = ("opsd_ib_errors_total", {"device": "mlx5_0", "port": "1", "error": "symbol_error"})


def alarms(kind: str, hours: float) -> dict[int, float]:
    """The second of the first incident on each of fifty healthy nodes that has one."""
    found = {n: opened(BOOKS[kind], HEALTHY[kind](n), hours * 3600.0, LOOK_S) for n in range(MODELS)}
    return {number: at for number, at in found.items() if at is not None}


@pytest.mark.parametrize("kind", HEALTHY)
def test_fifty_healthy_nodes_have_no_incident_in_half_an_hour(kind: str) -> None:
    """Errors in clusters, bursts, checkpoints, files that come and go, loads that wander."""
    assert alarms(kind, 0.5) == {}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", HEALTHY)
def test_fifty_healthy_nodes_have_no_incident_in_72_hours(kind: str) -> None:
    """Each of them for 72 hours."""
    assert alarms(kind, HOURS) == {}


@pytest.mark.parametrize("number", range(5))
def test_memory_errors_that_really_grow(number: int) -> None:
    """By five a minute each minute: within ten minutes."""
    at = opened(BOOKS["gpu_ecc_trend"], series.growing_counter(*ECC, 1200.0, 5.0, number), 3600.0)
    assert at is not None and 1200.0 <= at <= 1800.0


@pytest.mark.parametrize("number", range(5))
def test_bit_errors_that_really_grow(number: int) -> None:
    """By one a minute each minute: within ten minutes."""
    at = opened(BOOKS["nic_degrading"], series.growing_counter(*PORT, 1200.0, 1.0, number), 3600.0)
    assert at is not None and 1200.0 <= at <= 1800.0


def test_a_drive_that_is_written_to_death() -> None:
    """At 3 GB/s it lasts eleven days: found when that has lasted for three hours."""
    at = opened(BOOKS["nvme_failing"], series.drive_written_to_death(3e9), 6 * 3600.0)
    assert at is not None and 3 * 3600.0 <= at - 600.0 <= 3.5 * 3600.0


@pytest.mark.parametrize(("share_an_hour", "within_s"), [(0.5, 1300.0), (1.0, 1000.0), (2.0, 600.0)])
def test_a_disk_that_really_fills_up(share_an_hour: float, within_s: float) -> None:
    """Found in good time: with minutes left if it takes twelve, half an hour if it takes an hour."""
    at = opened(BOOKS["storage_full"], series.disk_filling(share_an_hour), 7200.0)
    assert at is not None and at <= within_s
    assert (0.4 - share_an_hour * at / 3600.0) / share_an_hour * 3600.0 >= 240.0
