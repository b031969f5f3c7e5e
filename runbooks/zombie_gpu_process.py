"""A GPU is in use that should be free: a process of an ended run, memory without a process, an unrelated process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from opsd.collectors.base import GpuFact, RankFact
from opsd.runbooks.base import Cost, Culprit, Finding, Incident, Severity, View
from opsd.runbooks.lib.gpus import GpuRunbook, by_gpu, gpu_of, newest, told
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import run_of
from opsd.runbooks.lib.signals import text

PROCESSES, USED = "opsd_gpu_processes", "DCGM_FI_DEV_FB_USED"
DEAD_PROCESSES, DEAD_MEMORY = "opsd_gpu_orphan_processes", "opsd_gpu_orphan_memory_bytes"
JOBS = "opsd_slurm_jobs"

LEAST_MIB = 2048.0
"""Device memory in use that a driver without clients does not explain."""

ALONE_S = 60.0
"""Memory that no process holds is released within seconds after the last one has ended."""

DEAD = (None, "Z", "X")
ENDED = ("finished", "failed")


def _counted(processes: float) -> str:
    return "1 process" if processes == 1 else f"{processes:.0f} processes"


def _works(rank: RankFact) -> bool:
    return rank.live and rank.process not in DEAD


def _ended(view: View, rank: RankFact) -> bool:
    """True if the run of a rank that is gone has ended; a live launcher may be restarting it."""
    run = run_of(view, rank.run)
    return run is None or not run.alive or not run.takes_part or run.state in ENDED


def _undead(gpu: GpuFact, dead: float) -> str:
    """Dead processes that the driver still lists, because it hangs in their cleanup."""
    pids = f" (pid {', '.join(map(str, gpu.orphans))})" if gpu.orphans else ""
    return f"{_counted(dead)} held by the driver though dead{pids}" if dead else ""


def _left_behind(view: View, gpu: GpuFact, processes: float) -> str:
    """Processes on a GPU whose run has ended."""
    gone = [rank for rank in view.ranks if rank.gpu == gpu.index]
    if not gone or any(_works(rank) or not _ended(view, rank) for rank in gone):
        return ""
    rank = max(gone, key=lambda rank: rank.generation)
    state = f"; rank {rank.rank} (pid {rank.pid}) is in state {rank.process}" if rank.process else ""
    return f"{_counted(processes)} left on it although run {rank.run} has ended{state}"


def _strangers(view: View, extra: Mapping[int, float], gpu: GpuFact) -> str:
    """Processes besides those of the ranks, more than on the other GPUs of the run."""
    others = [count for index, count in extra.items() if index != gpu.index]
    more = extra.get(gpu.index, 0.0) - (median(others) if others else 0.0)
    return f"{_counted(more)} on it besides those of the run" if more >= 1 else ""


def _ownerless(view: View, gpu: GpuFact, used: float) -> str:
    """Memory in use for a while without a process."""
    memory, processes = by_gpu(view, USED).get(gpu.uuid), by_gpu(view, PROCESSES).get(gpu.uuid)
    if used < LEAST_MIB or not memory or not processes:
        return ""
    held = [value >= LEAST_MIB for _, value in memory[0].values(ALONE_S)]
    alone = [value == 0 for _, value in processes[0].values(ALONE_S)]
    enough = len(held) >= 0.9 * ALONE_S and len(alone) >= 0.9 * ALONE_S
    return f"{used / 1024:.1f} GiB of its memory in use by no process" if enough and all(held) and all(alone) else ""


def _jobless(view: View, gpu: GpuFact, processes: float, used: float) -> str:
    """Processes that hold memory of a GPU for a while though Slurm runs no job here."""
    memory, jobs = by_gpu(view, USED).get(gpu.uuid), view.select(JOBS)
    if used < LEAST_MIB or not memory or not jobs or jobs[0].last != 0.0:
        return ""
    idle = [value == 0 for _, value in jobs[0].values(ALONE_S)]
    held = [value >= LEAST_MIB for _, value in memory[0].values(ALONE_S)]
    if len(held) < 0.9 * ALONE_S or not all(held) or not all(idle):
        return ""
    return f"{_counted(processes)} of no job on it, with {used / 1024:.1f} GiB of its memory"


def _held(view: View) -> dict[str, tuple[GpuFact, str]]:
    """The GPUs in use, by UUID, and by what.

    While a rank works on a GPU that nobody knows, no process on any GPU is known not to be its own.
    """
    processes, used, dead = newest(view, PROCESSES), newest(view, USED), newest(view, DEAD_PROCESSES)
    working = {gpu.index: sum(_works(rank) for rank in view.ranks if rank.gpu == gpu.index) for gpu in view.gpus}
    homeless = any(_works(rank) and rank.gpu is None for rank in view.ranks)
    counts = {gpu.index: processes[gpu.uuid] for gpu in view.gpus if gpu.uuid in processes}
    extra = {index: count - working[index] for index, count in counts.items() if working[index]}
    found = {}
    for gpu in view.gpus:
        count = counts.get(gpu.index)
        if count is None:
            continue
        what = _undead(gpu, dead.get(gpu.uuid, 0.0))
        what = what or (_ownerless(view, gpu, used.get(gpu.uuid, 0.0)) if not count else "")
        what = what or (_strangers(view, extra, gpu) if working[gpu.index] and not homeless else "")
        what = what or (_left_behind(view, gpu, count) if count and not working[gpu.index] and not homeless else "")
        what = what or (_jobless(view, gpu, count, used.get(gpu.uuid, 0.0)) if count and not working[gpu.index] else "")
        if what:
            found[gpu.uuid] = gpu, what
    return found


def _detect(view: View) -> Iterator[Finding]:
    for uuid, (gpu, what) in _held(view).items():
        used, dead = newest(view, USED).get(uuid), newest(view, DEAD_MEMORY).get(uuid)
        memory = f"{used / 1024:.1f} GiB of GPU {gpu.index} are in use" if used is not None else ""
        kept = f"{dead / 2**30:.1f} GiB of it by processes that are dead" if dead else ""
        yield Finding(
            key=uuid,
            severity=Severity.WARNING,
            summary=f"GPU {gpu.index} of {view.node}: {what}",
            culprit=Culprit("gpu", view.node, gpu.index, detail=what),
            confidence=0.85,
            evidence=(*told(view, uuid, PROCESSES, f"GPU {gpu.index}: {what}"), *told(view, uuid, USED, memory, kept)),
            cost=Cost(text="the next rank on this GPU may run out of memory, or shares it with a stranger"),
            data={"uuid": uuid},
        )


def _healed(incident: Incident, view: View) -> bool | None:
    """True once only ranks use the GPU. Leftover processes count even after the run's pages are forgotten."""
    uuid = text(incident.data, "uuid")
    count, used = newest(view, PROCESSES).get(uuid), newest(view, USED).get(uuid)
    gpu = gpu_of(view, uuid)
    if count is None or used is None or gpu is None:
        return None
    working = any(_works(rank) for rank in view.ranks if rank.gpu in (gpu.index, None))
    return uuid not in _held(view) if working else count == 0 and used < LEAST_MIB


RUNBOOK = GpuRunbook(
    first=("kill -KILL PID", "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv"),
    detect=_detect,
    remedy=notify_node(": end what holds it, or reset the GPU"),
    healed=_healed,
    open_after_s=30.0,
    clear_after_s=10.0,
    verify_s=900.0,
)
