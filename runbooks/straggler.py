"""One rank computes slower than its peers, step after step, and every other rank waits for it.

Stragglers as the launcher that leads the run announces them: it sees the ranks of all nodes. A user's word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from opsd.collectors.base import Event, RankFact, StepFact
from opsd.runbooks.base import Cause, Culprit, Evidence, Finding, Incident, Severity, View
from opsd.runbooks.gpu_throttle import unfit_gpus
from opsd.runbooks.lib.gpus import newest, set_by_opsd, told
from opsd.runbooks.lib.losses import lost, lost_by
from opsd.runbooks.lib.remedies import RunRunbook, notify_node
from opsd.runbooks.lib.runs import (
    job_of,
    live_ranks,
    quoted,
    rank_then,
    ranks_of,
    run_finding,
    run_over,
    run_recovered,
    world_size,
)
from opsd.runbooks.lib.signals import counted, excess, integer, integers, number, seconds_spent, spread, text

FOUND, GONE = "straggler_found", "straggler_gone"
VALID_S = 180.0
"""The leader repeats what lasts each minute; what it has not repeated for so long is over."""
COMPONENTS = {"slow GPU": "gpu", "slow data": "data", "slow link": "network"}
"""Causes by the component that they blame, where it is not the rank or its node."""


def announced(view: View) -> Iterator[Finding]:
    """The stragglers that leaders have announced and not withdrawn."""
    newest: dict[str, Event] = {}
    for event in sorted((*view.events(FOUND, VALID_S), *view.events(GONE, VALID_S)), key=lambda event: event.at):
        newest[key(event)] = event
    for name, event in newest.items():
        if event.kind == FOUND and any(rank.run == text(event.data, "run") and rank.live for rank in view.ranks):
            yield _news_finding(name, event, view)


def key(event: Event) -> str:
    """What makes two announcements the same: the rank, the node of several, or the cause if nobody is to blame."""
    ranks, run = integers(event.data, "ranks"), text(event.data, "run")
    if not ranks:
        return f"{run}/{text(event.data, 'cause')}"
    return f"{run}/rank {ranks[0]}" if len(ranks) == 1 else f"{run}/ranks of {_node(event)}"


def announcement_healed(incident: Incident, view: View) -> bool | None:
    """True once the leader has taken it back or repeats it no more, or the run has ended."""
    if not view.known("ranks"):
        return None
    if any(finding.key == incident.key for finding in announced(view)):
        return False
    over = run_over(incident, view)
    return True if over is None else over or any(rank.live for rank in view.ranks)


def _node(event: Event) -> str:
    nodes = event.data.get("culprit_nodes")
    return str(nodes[0]) if isinstance(nodes, list | tuple) and nodes else text(event.data, "node")


def _news_finding(name: str, event: Event, view: View) -> Finding:
    data = event.data
    run, cause, ranks = text(data, "run"), text(data, "cause"), integers(event.data, "ranks")
    slowdown = max(1.0, number(data, "slowdown") or 1.0)
    cost = 1.0 - 1.0 / slowdown
    sentences = data.get("evidence")
    said = [str(one) for one in sentences] if isinstance(sentences, list | tuple) else []
    several = f": {counted(len(ranks), 'rank')} on {_node(event)}"
    who = several if len(ranks) > 1 else f": rank {ranks[0]}" if ranks else ""
    compared = f"compared: {counted(integer(data, 'compared', 0), 'rank')} of the job"
    told = rank_then(view, run, ranks[0], event.at) if ranks else next(iter(ranks_of(view, run)), None)
    return Finding(
        key=name,
        severity=Severity.INFO if not ranks else Severity.CRITICAL if cost >= COSTLY else Severity.WARNING,
        summary=f"{cause} in {run}{who}; steps take {slowdown:.2f} times as long",
        culprit=_culprit(cause, ranks, event, view),
        confidence=min(1.0, max(0.0, number(data, "confidence") or 0.5)),
        evidence=quoted(event, "launcher", *said, compared, text(data, "advice")),
        cost=lost(view, told, cost) if told else lost_by(f"run {run}", cost, world_size(view, run)),
        job=job_of(view, run),
        data={
            "run": run, "rank": ranks[0] if ranks else None, "generation": integer(data, "generation"), "leader": True,
        },
    )  # fmt: skip


def _culprit(cause: str, ranks: list[int], event: Event, view: View) -> Culprit:
    if not ranks:
        return Culprit("user code", detail=cause)
    page = rank_then(view, text(event.data, "run"), ranks[0], event.at)
    gpu = page.gpu if page is not None and len(ranks) == 1 else None
    component = COMPONENTS.get(cause, "rank" if len(ranks) == 1 else "node")
    return Culprit(component, view.node, gpu, ranks[0] if len(ranks) == 1 else None, cause)


NOT_COMPUTING = ("collective", "data", "checkpoint", "evaluation", "setup")
"""Phases in which a rank waits for others or for the node; only what is left can make it a straggler."""

RECENT_S = 20.0
LEAST_STEPS, SETTLED_STEPS = 5, 10
SLOW = 0.07
"""A rank this much above the median of its peers is a straggler: a GPU that is 10 % slow must be caught for sure."""

OUTLIER = 4.0
"""... and this many robust standard deviations, so that a job whose ranks differ by nature has none."""

CONSISTENT = 0.8
"""... in this share of the recent steps: a single hiccup moves no median, a bad minute is not a bad GPU."""

COSTLY = 0.2


@dataclass(frozen=True, slots=True)
class Straggler:
    """``share`` is how much longer it computes than the median of its peers, ``extra_s`` that in seconds a step."""

    rank: RankFact
    share: float
    compute_s: float
    peers_s: float
    steps: int
    peers: int

    @property
    def extra_s(self) -> float:
        return self.compute_s - self.peers_s


def compute_seconds(step: StepFact) -> float:
    """The part of a step in which the rank itself worked, in seconds."""
    return step.without(NOT_COMPUTING)


def _recent(rank: RankFact, now: float) -> dict[int, float]:
    """Step -> seconds of computing, of the rank's last steps."""
    settled = [step for step in rank.steps if rank.steps_reported - (rank.steps[-1].step - step.step) > SETTLED_STEPS]
    recent = [step for step in settled if now - step.end <= RECENT_S]
    return {
        step.step: compute_seconds(step) for step in (recent if len(recent) >= LEAST_STEPS else settled[-LEAST_STEPS:])
    }


def _stragglers(ranks: Sequence[RankFact], now: float) -> list[Straggler]:
    """The stragglers among the ranks of one generation, compared over the steps that all of them have done."""
    recent = {rank.rank: _recent(rank, now) for rank in ranks}
    common = sorted(set.intersection(*(set(steps) for steps in recent.values())))
    if len(common) < LEAST_STEPS:
        return []
    rows = {number: [steps[step] for step in common] for number, steps in recent.items()}
    candidates = (_compare(rank, rows) for rank in ranks)
    return [candidate for candidate in candidates if candidate is not None]


def _compare(rank: RankFact, rows: Mapping[int, Sequence[float]]) -> Straggler | None:
    """The rank as a straggler, None if it is none. ``rows`` has the computing seconds of each rank, step by step."""
    own, others = rows[rank.rank], [row for number, row in rows.items() if number != rank.rank]
    typical = [median(row) for row in others]
    share, middle = excess(median(own), typical), median(typical)
    if share < SLOW or median(own) - middle < OUTLIER * max(spread(typical), 0.01 * middle):
        return None
    slower = [
        mine > (1 + SLOW / 2) * median(theirs) for mine, theirs in zip(own, zip(*others, strict=True), strict=True)
    ]
    if sum(slower) < CONSISTENT * len(slower):
        return None
    return Straggler(rank, share, median(own), middle, len(own), len(others))


def _groups(view: View) -> Iterator[list[RankFact]]:
    """The live ranks of each run, if there are at least two in its newest generation."""
    for run in sorted({rank.run for rank in view.ranks}):
        ranks = live_ranks(view, run)
        newest_generation = max((rank.generation for rank in ranks), default=0)
        ranks = [rank for rank in ranks if rank.generation == newest_generation and rank.steps]
        if len(ranks) > 1:
            yield ranks


def stragglers_of(view: View, run: str) -> list[Straggler]:
    """The stragglers of ``run`` among its ranks on this node."""
    return [found for ranks in _groups(view) if ranks[0].run == run for found in _stragglers(ranks, view.now)]


def _detect(view: View) -> Iterator[Finding]:
    known = list(announced(view))
    judged = {finding.data["run"] for finding in known}
    found = [
        straggler for ranks in _groups(view) if ranks[0].run not in judged for straggler in _stragglers(ranks, view.now)
    ]
    unfit = unfit_gpus(view) if found or known else set()
    yield from (finding for finding in known if finding.culprit.gpu is None or finding.culprit.gpu not in unfit)
    yield from (_finding(straggler, view) for straggler in found if straggler.rank.gpu not in unfit)


def _finding(found: Straggler, view: View) -> Finding:
    rank = found.rank
    step_s = rank.steps[-1].duration_s
    cost = min(found.extra_s / step_s, 1.0) if step_s > 0 else 0.0
    said = f"rank {rank.rank} computes {found.compute_s:.3f} s a step, the median of its {found.peers} peers is"
    return run_finding(
        view, rank, f"{said} {found.peers_s:.3f} s over the same {found.steps} steps",
        key=f"{rank.run}/rank {rank.rank}",
        severity=Severity.CRITICAL if cost >= COSTLY else Severity.WARNING,
        summary=f"rank {rank.rank} of {rank.run} is {found.share:.0%} slower than its peers",
        culprit=Culprit("rank", view.node, rank.gpu, rank.rank, "slow computing"),
        confidence=0.8 if found.peers > 1 else 0.5,
        cost=lost(view, rank, cost),
    )  # fmt: skip


def _diagnose(finding: Finding, view: View) -> Finding:
    """What the witnesses say makes it the GPU or the host; otherwise the rank is named and the reason is open."""
    if finding.culprit.component not in ("rank", "node", "gpu"):
        return finding
    return explained(finding, view)


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the rank keeps up over as many steps as it took to find it, or its run has ended as planned."""
    if incident.data.get("leader"):
        return announcement_healed(incident, view)
    run, number = text(incident.data, "run"), integer(incident.data, "rank")
    for ranks in _groups(view):
        if ranks[0].run == run and any(rank.rank == number for rank in ranks):
            enough = all(len(_recent(rank, view.now)) >= LEAST_STEPS for rank in ranks)
            return all(s.rank.rank != number for s in _stragglers(ranks, view.now)) if enough else None
    return run_recovered(incident, view) or None


RUNBOOK = RunRunbook(
    first=("nvidia-smi -q -d PERFORMANCE,CLOCK -i GPU", "opsd diagnose"),
    detect=_detect,
    diagnose=_diagnose,
    remedy=notify_node(),
    healed=_healed,
    open_after_s=10.0,
    look_every_s=5.0,
    clear_after_s=20.0,
    verify_s=600.0,
    causes=(
        Cause("gpu_throttle", "gpu", lag_s=60.0),
        Cause("gpu_capped", "gpu", lag_s=60.0),
        Cause("pcie_degraded", "gpu", lag_s=60.0),
        Cause("dataloader_stall", "rank"),
        Cause("nvlink_errors", "gpu", lag_s=60.0),
        Cause("cpu_thermal", "node", lag_s=60.0),
        Cause("host_memory", "node", lag_s=60.0),
        Cause("clock_unstable", "node", lag_s=60.0),
    ),
)


CLOCK = "DCGM_FI_DEV_SM_CLOCK"
POWER_LIMIT, POWER_DEFAULT = "opsd_gpu_power_limit_watts", "opsd_gpu_power_limit_default_watts"
REASONS = "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"
PRESSURE = "opsd_host_pressure_seconds_total"
COOLING = "opsd_thermal_cooling_ratio"
BEHIND = 0.95
"""A clock or limit below this share of what it should be explains a slow rank."""
SET_BY_SOMEBODY = 0x2
"""The bit of the reasons for clocks set by a user (nvmlClocksEventReasonApplicationsClocksSetting in nvml.h)."""
LOOK_S = 30.0
PRESSURE_SHARE = 0.1
"""Tasks that wait for processor or memory for this share of the time slow a rank down."""


@dataclass(frozen=True, slots=True)
class SlowCause:
    """Component and detail of a culprit, with the evidence."""

    component: str
    detail: str
    evidence: tuple[Evidence, ...]


def explained(finding: Finding, view: View) -> Finding:
    """The finding with the likeliest of what the witnesses say; as it is if they say nothing."""
    cause = next(_causes(view, finding.culprit.gpu), None)
    if cause is None:
        return finding
    return replace(
        finding,
        culprit=replace(finding.culprit, component=cause.component, detail=cause.detail),
        confidence=max(finding.confidence, 0.9),
        evidence=(*finding.evidence, *cause.evidence),
    )


def _causes(view: View, gpu: int | None) -> Iterator[SlowCause]:
    if gpu is not None and view.known("nvml"):
        yield from _power(view, gpu)
        yield from _clock(view, gpu)
    if view.known("host"):
        yield from _host(view)
    if view.known("thermal"):
        yield from _heat(view)


def _indexes(view: View) -> dict[str, int]:
    return {fact.uuid: fact.index for fact in view.gpus}


def _own(view: View, metric: str, gpu: int) -> tuple[str, float, list[float]] | None:
    """UUID and value of the GPU with this index, and the values of the others."""
    indexes = _indexes(view)
    values = {uuid: value for uuid, value in newest(view, metric).items() if uuid in indexes}
    uuid = next((uuid for uuid in values if indexes[uuid] == gpu), None)
    return None if uuid is None else (uuid, values[uuid], [v for other, v in values.items() if other != uuid])


def _power(view: View, gpu: int) -> Iterator[SlowCause]:
    """The limit in force is below the board's default: somebody has set it."""
    limit, default = _own(view, POWER_LIMIT, gpu), _own(view, POWER_DEFAULT, gpu)
    if limit is None or default is None or limit[1] >= BEHIND * default[1]:
        return
    who = "opsd lowered it" if set_by_opsd(view, limit[0], limit[1]) else "it was set by somebody"
    said = f"the power limit of GPU {gpu} is {limit[1]:.0f} W, its default {default[1]:.0f} W: {who}"
    yield SlowCause("gpu", "power cap", told(view, limit[0], POWER_LIMIT, said))


def _clock(view: View, gpu: int) -> Iterator[SlowCause]:
    own = _own(view, CLOCK, gpu)
    if own is None or not own[2] or own[1] > BEHIND * median(own[2]):
        return
    said = f"the SM clock of GPU {gpu} is {own[1]:.0f} MHz, its peers' {median(own[2]):.0f} MHz"
    if int(newest(view, REASONS).get(own[0], 0.0)) & SET_BY_SOMEBODY:
        limited = "the driver says that clocks set by somebody hold it back (nvidia-smi --reset-applications-clocks)"
        yield SlowCause("gpu", "application clocks", told(view, own[0], CLOCK, said, limited))
    yield SlowCause("gpu", "low clock", told(view, own[0], CLOCK, said))


def _host(view: View) -> Iterator[SlowCause]:
    for resource, kind, words in (("memory", "full", "memory"), ("cpu", "some", "a processor")):
        for series in view.select(PRESSURE, resource=resource, kind=kind):
            share = seconds_spent(series, LOOK_S) / LOOK_S
            if share > PRESSURE_SHARE and len(series.values(LOOK_S)) > 1:
                said = f"tasks on this node waited for {words} in {share:.0%} of the last {LOOK_S:.0f} s"
                yield SlowCause("node", f"{resource} pressure", (Evidence(said, "kernel", view.wall),))


def _heat(view: View) -> Iterator[SlowCause]:
    """Processors that the kernel has held back all the time. Other cooling devices, as fans, are there to be used."""
    for series in view.select(COOLING, type="Processor"):
        ratios = [value for _, value in series.values(LOOK_S)]
        if len(ratios) > 1 and series.last and min(ratios) > 0:
            said = f"the kernel holds processors back for their heat, by {series.last:.0%} of what it can"
            yield SlowCause("node", "processor heat", (Evidence(said, "kernel", view.wall),))
