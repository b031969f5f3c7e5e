"""The storage that a run reads from is slow: a disk, a file server, or a cache that evicts what is read again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from opsd.collectors.base import Event
from opsd.runbooks.base import Cause, Cost, Culprit, Evidence, Finding, Incident, Runbook, Series, Severity, View
from opsd.runbooks.lib.losses import lost
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import live_ranks
from opsd.runbooks.lib.signals import counted, growth, latest, level, number, said, text

DISK, NFS = "opsd_storage_io_latency_seconds", "opsd_storage_nfs_latency_seconds"
REFAULTS = "opsd_storage_page_refaults_total"
BLOCKED = "opsd_host_tasks_blocked"
REACHABLE, COLLECTOR = "opsd_storage_reachable", "opsd_collector_state"

RECENT_S, LEAST_RECENT, LATEST = 30.0, 10, 5
"""What is slow has been so for most of this time, in at least so many samples, and is so in the latest ones."""

PAST_S, BUT_LAST_S, LEAST_PAST = 600.0, 45.0, 30
FACTOR = 5.0
FLOORS_S: Mapping[str, tuple[float, float]] = {DISK: (0.02, 0.25), NFS: (0.05, 1.0)}
"""Least latency that is slow, with a past to compare with and without one; a local NVMe answers in 0.2 ms."""

NFS_READS = ("read", "open", "lookup", "getattr")

EVICTED, EVICTED_FACTOR = 5000.0, 5.0
"""Pages a second (20 MB) that are read again soon after their eviction, and how many times more than before."""

LOST_S = 600.0
RECONNECT_S = 15.0
"""Clients of Lustre, CephFS and BeeGFS connect again within seconds, unless the server is gone. NFS waits a
minute before it says that a server does not respond."""

SOFT_S = 60.0
"""A soft NFS mount gives an operation up (`timed out`). Neither it nor CIFS says when the server answers again."""

ERRORS_QUOTED = 2
"""Errors of Lustre's requests and of its network that an incident about a lost server quotes: the newest."""

COSTLY = 0.1
WAITING_S = 3.0
"""It costs training time once ranks wait for data in a tenth of their steps, or one waits this long right now."""


@dataclass(frozen=True, slots=True)
class _Slow:
    """Something slow. ``where`` names it for good, ``before`` is its usual latency in seconds, 0 if it has none."""

    where: str
    what: str
    detail: str
    before: float = 0.0
    source: str = "storage"


def _slow_series(view: View, series: Series, metric: str) -> tuple[float, float] | None:
    """(latency now, latency before) in seconds if this series has become slow."""
    least, alone = FLOORS_S[metric]
    recent = [value for _, value in series.values(RECENT_S)]
    if len(recent) < LEAST_RECENT or (now := min(median(recent), median(recent[-LATEST:]))) < least:
        return None
    past = level(series, PAST_S, BUT_LAST_S)
    before = past[0] if past is not None and past[2] >= LEAST_PAST else alone / FACTOR
    return (now, before) if now >= FACTOR * before else None


def _disks(view: View) -> Iterator[_Slow]:
    """Slow reads of a disk. While a checkpoint is being written they are no surprise, and no incident if none waits."""
    mounts = {s.labels["disk"]: s.labels["mount"] for s in view.select("opsd_storage_mount_info") if s.labels["disk"]}
    for series in view.select(DISK, op="read"):
        slow = _slow_series(view, series, DISK)
        if slow is not None and (not _saving(view) or _waiting(view) >= COSTLY):
            device = series.labels["device"]
            name = f"{device} ({mounts[device]})" if device in mounts else device
            yield _Slow(device, f"{name} answers reads in {_ms(slow[0])}, {_ms(slow[1])} before", name, slow[1])


def _servers(view: View) -> Iterator[_Slow]:
    """Slow operations of an NFS mount, the slowest for each mount."""
    found: dict[str, tuple[float, float, str]] = {}
    for series in view.select(NFS):
        labels = series.labels
        if labels["op"] in NFS_READS and (slow := _slow_series(view, series, NFS)) is not None:
            found[labels["mount"]] = max(found.get(labels["mount"], (0.0, 0.0, "")), (*slow, labels["op"]))
    for mount, (now, before, op) in found.items():
        yield _Slow(mount, f"{mount}: {op} takes {_ms(now)}, {_ms(before)} before", mount, before)


def _lost(view: View) -> Iterator[_Slow]:
    """Network file systems that do not answer: by an error, by the kernel's word, or by never returning."""
    for series in view.select(REACHABLE):
        if series.last == 0.0:
            mount = series.labels["mount"]
            yield _Slow(mount, f"{mount} answers with an error", mount)
    for server in _lost_servers(view):
        yield _Slow(server, f"the kernel says that {server} does not respond", server, source="kernel log")
    if latest(view, COLLECTOR, collector="storage_net", state="hung"):
        yield _Slow("network file systems", "a network file system does not return at all", "a network file system")


def _lost_servers(view: View) -> list[str]:
    """Servers whose last word in the kernel log is that they do not respond."""
    events = [*view.events("network_filesystem_lost", LOST_S), *view.events("network_filesystem_restored", LOST_S)]
    words = {text(event.data, "server"): event for event in sorted(events, key=lambda event: event.at)}
    return [
        server
        for server, event in words.items()
        if event.kind == "network_filesystem_lost" and _still_lost(event, view.wall - event.at)
    ]


def _still_lost(event: Event, age_s: float) -> bool:
    """Whether a loss so old means that the server is gone, with no word that it is back."""
    filesystem = text(event.data, "fs")
    unended = filesystem == "cifs" or text(event.data, "outcome") == "timed out"
    waited = filesystem.startswith(("cifs", "nfs", "lockd")) or age_s >= RECONNECT_S
    return waited and (not unended or age_s < SOFT_S)


def _evictions(view: View) -> float:
    """Pages a second that are read again soon after their eviction, 0.0 unless that is far more than before."""
    series = view.select(REFAULTS)
    if not series or (rate := growth(series[0], RECENT_S) / RECENT_S) < EVICTED:
        return 0.0
    points = series[0].values(PAST_S)
    older = [point for point in points if point[0] <= view.now - BUT_LAST_S]
    before = max(older[-1][1] - older[0][1], 0.0) / (older[-1][0] - older[0][0]) if len(older) > 1 else 0.0
    return rate if rate >= EVICTED_FACTOR * before else 0.0


def _saving(view: View) -> bool:
    """True while a run here writes a checkpoint, in front of the training or behind it."""
    ranks = live_ranks(view)
    committed = max((rank.committed_step for rank in ranks if rank.committed_step is not None), default=-1)
    return any(
        rank.phase == "checkpoint"
        or any(step.phase_s.get("checkpoint", 0.0) > 0 and step.step - 1 > committed for step in rank.steps)
        for rank in ranks
    )


def _waiting(view: View) -> float:
    """The share of their time that the ranks here wait for data; 1.0 if one waits for seconds right now."""
    shares = [0.0]
    for rank in live_ranks(view):
        if rank.phase == "data" and view.now - rank.phase_since >= WAITING_S:
            return 1.0
        recent = [step for step in rank.steps if view.now - step.end <= RECENT_S and step.duration_s > 0]
        shares += [median(step.phase_s.get("data", 0.0) / step.duration_s for step in recent)] if recent else []
    return max(shares)


def _detect(view: View) -> Iterator[Finding]:
    evicted = _evictions(view)
    slow = {one.where: one for one in (*_disks(view), *_servers(view), *_lost(view))}
    if evicted and not slow and _waiting(view) >= COSTLY:
        slow["page cache"] = _Slow("page cache", "", "page cache")
    return (_finding(view, one, evicted) for one in slow.values())


def _finding(view: View, slow: _Slow, evicted: float) -> Finding:
    share, ranks = _waiting(view), live_ranks(view)
    again = f"{evicted:.0f} pages a second are read again soon after they were evicted" if evicted else ""
    waits = f"ranks wait for data in {share:.0%} of their time" if share >= COSTLY else ""
    stuck = int(latest(view, BLOCKED) or 0)
    blocked = f"{counted(stuck, 'task')} of the node blocked on input or output" if stuck else ""
    facts = ((slow.source, slow.what), ("page cache", again), ("rank pages", waits), ("host", blocked))
    errors = view.events("network_filesystem_error", LOST_S) if slow.source == "kernel log" else ()
    detail = f"{slow.detail}: evicts what is read again" if evicted else slow.detail
    return Finding(
        key=f"{view.node}/{slow.where}",
        severity=Severity.CRITICAL if waits else Severity.WARNING,
        summary=f"{view.node}: {slow.what or again}",
        culprit=Culprit("storage", view.node, detail=detail),
        confidence=0.85 if slow.what else 0.7,
        evidence=(
            *(evidence for source, fact in facts for evidence in said(view, source, fact)),
            *(Evidence(event.message, "kernel log", event.at) for event in errors[-ERRORS_QUOTED:]),
        ),
        cost=lost(view, max(ranks, key=lambda rank: rank.world_size), share, counted_s=RECENT_S) if waits else Cost(),
        job=ranks[0].job if ranks else "",
        data={"where": slow.where, "before": slow.before},
    )


def _healed(incident: Incident, view: View) -> bool | None:
    """True once it answers about as fast as before; None if it is not asked anything, or cannot be seen."""
    where, before = text(incident.data, "where"), number(incident.data, "before") or 0.0
    if any(one.where == where for one in _lost(view)):
        return False
    if where == "page cache":
        return _evictions(view) == 0.0 or _waiting(view) < COSTLY / 2
    if not before:
        return view.known("storage_net") or None
    recent = [
        [value for _, value in series.values(RECENT_S)]
        for metric, label in ((DISK, "device"), (NFS, "mount"))
        for series in view.select(metric, **{label: where})
        if series.labels["op"] in ("read", *NFS_READS)
    ]
    medians = [median(values) for values in recent if len(values) >= LEAST_RECENT]
    return max(medians) < FACTOR / 2 * before if medians else None


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms"


RUNBOOK = Runbook(
    first=("iostat -x 1 5",),
    detect=_detect,
    remedy=notify_node("; move the dataset to local NVMe, or the job to a node that has it there"),
    healed=_healed,
    needs=("storage",),
    open_after_s=10.0,
    clear_after_s=30.0,
    verify_s=1800.0,
    causes=(Cause("nvme_failing", "node", lag_s=60.0),),
)
