"""Memory and CPU of the agent over an hour, scraped every second: neither may grow once its window is full."""

from __future__ import annotations

import os
import time

from opsd.bench.agent import Exporter, node, ours

MINUTES = int(os.environ.get("OPSD_BENCH_SOAK_MINUTES", "60"))
WINDOW_MINUTES = 10
"""The length of the agent's window: memory grows until it is full."""


def run() -> dict[str, float | int | str]:
    """Resident memory at the end of each ten minutes, and CPU in percent of one core during them."""
    with node() as place, ours(place) as agent:
        stretches = [_stretch(agent, WINDOW_MINUTES * 60) for _ in range(max(2, MINUTES // WINDOW_MINUTES))]
    (full_mib, _), (end_mib, end_cpu) = stretches[0], stretches[-1]
    return {
        "minutes": len(stretches) * WINDOW_MINUTES,
        "ours_rss_full_window_mib": full_mib,
        "ours_rss_end_mib": end_mib,
        "ours_rss_max_mib": max(mib for mib, _ in stretches),
        "ratio_rss_growth": end_mib / full_mib,
        "ours_cpu_second_stretch_percent": stretches[1][1],
        "ours_cpu_last_stretch_percent": end_cpu,
        "ratio_cpu_growth": end_cpu / stretches[1][1],
    }


def _stretch(agent: Exporter, seconds: float) -> tuple[float, float]:
    """Memory in MiB after, and CPU in percent during, ``seconds`` of being scraped."""
    used, began = agent.cpu_s(), time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        agent.scrape()
        time.sleep(1.0)
    return agent.rss_mib(), 100 * (agent.cpu_s() - used) / elapsed
