"""Local storage (scratch NVMe): bandwidth and random reads with fio, judged by what the run needs."""

from __future__ import annotations

import tempfile

from opsd.preflight import storage
from opsd.preflight.base import Check, Context, Outcome, Progress


def run(context: Context, progress: Progress) -> Outcome:
    """Measure the configured folder, or the one for temporary files."""
    return storage.run(context, progress, context.local_dir or tempfile.gettempdir())


CHECK = Check(
    name="storage_local",
    title="Local storage",
    run=run,
    seconds={"quick": 6, "standard": 30, "burn-in": 300, "spare": 30},
    measures=storage.measures(),
    needs=frozenset({"exclusive"}),
    advice="look at `nvme smart-log` for wear and temperature, and at other users of the disk with iotop",
)
