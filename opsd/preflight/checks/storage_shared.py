"""Shared storage (Lustre, Weka, NFS …): bandwidth and random reads with fio, judged by what the run needs."""

from __future__ import annotations

from opsd.preflight import storage
from opsd.preflight.base import Check, Context, NotApplicableError, Outcome, Progress


def run(context: Context, progress: Progress) -> Outcome:
    """Measure the configured folder."""
    if not context.shared_dir:
        raise NotApplicableError("preflight.shared_dir is not configured")
    return storage.run(context, progress, context.shared_dir)


CHECK = Check(
    name="storage_shared",
    title="Shared storage",
    run=run,
    seconds={"quick": 6, "standard": 30, "burn-in": 300, "spare": 30},
    measures=storage.measures(),
    needs=frozenset({"exclusive", "network"}),
    advice="compare with another node at the same time: if all are slow it is the storage, otherwise this node's mount",
)
