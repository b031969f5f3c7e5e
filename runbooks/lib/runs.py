"""Pure helpers about runs and ranks: the ranks of a run, whether it recovered, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from opsd.collectors.base import Event, RankFact, RunFact
from opsd.runbooks.base import Cost, Culprit, Evidence, Finding, Healed, Incident, Severity, View
from opsd.runbooks.lib.signals import counted, grouped, integer, number, said, text

REMEMBERED_S = 600.0
"""How far back a runbook looks for events."""

GOOD_EXITS = (0, 75)
"""Exit codes of a launcher whose run ended normally: done, or checkpointed to be requeued."""

FRESH_S = 10.0
"""An event at most this many seconds old is reported even if the run has recovered; longer than a collector fails, so
that a crash during such a failure is still reported."""


def ranks_of(view: View, run: str) -> list[RankFact]:
    """The ranks of ``run`` on this node, in the order of their numbers."""
    return sorted((rank for rank in view.ranks if rank.run == run), key=lambda rank: rank.rank)


def rank_of(view: View, run: str, rank: int) -> RankFact | None:
    """One rank of ``run``, None if this node has no page of it."""
    return next((fact for fact in view.ranks if fact.run == run and fact.rank == rank), None)


def rank_then(view: View, run: str, rank: int, second: float) -> RankFact | None:
    """One rank of ``run`` as it was at the wall second ``second``; as it is now if this node did not see it then.

    Evidence may be read late, when another process has the rank's number, or none has.
    """
    ranks = (*view.ranks_then(second), *view.ranks)
    return next((fact for fact in ranks if fact.run == run and fact.rank == rank), None)


def run_of(view: View, run: str) -> RunFact | None:
    """The run as its launcher describes it, None if it has no launcher on this node."""
    return next((fact for fact in view.runs if fact.run == run), None)


def supervised(view: View, run: str) -> bool:
    """True if a living launcher restarts the ranks of ``run``."""
    fact = run_of(view, run)
    return fact is not None and fact.alive and fact.state in ("running", "restarting")


def run_events(view: View, kind: str, run: str, seconds: float = REMEMBERED_S) -> Sequence[Event]:
    """The events of one kind that belong to ``run``, oldest first."""
    return view.events(kind, seconds, run)


def resumed_event(view: View, run: str, generation: int) -> Event | None:
    """The launcher's event that a generation after ``generation`` has completed its first step."""
    later = (e for e in run_events(view, "resumed", run) if integer(e.data, "generation") > generation)
    return next(later, None)


def recovered(view: View, run: str, generation: int) -> bool | None:
    """Whether ``run`` has recovered from the end of ``generation``.

    True once a later generation has completed a step or the run has ended as planned, False if its launcher gave
    up or died or no step is done yet, None while the rank pages cannot be read or nothing is known of the run.
    """
    if not view.known("ranks"):
        return None
    ranks, fact = ranks_of(view, run), run_of(view, run)
    if resumed_event(view, run, generation) or any(r.generation > generation and r.steps_reported for r in ranks):
        return True
    if fact is not None and fact.takes_part:
        return fact.state == "finished"
    ended = run_events(view, "finished", run)
    if ended:
        return integer(ended[-1].data, "exit_code") in GOOD_EXITS
    return False if ranks else None


def run_recovered(incident: Incident, view: View) -> bool | None:
    """Whether the incident's run has recovered from the end of the incident's generation; see ``recovered``."""
    return recovered(view, text(incident.data, "run"), integer(incident.data, "generation"))


def healed_by(calm: Callable[[Incident, View, RankFact], bool | None]) -> Healed:
    """Over once the run has recovered from the incident's generation; until then ``calm`` says it of its rank."""

    def healed(incident: Incident, view: View) -> bool | None:
        over = run_recovered(incident, view)
        rank = rank_of(view, text(incident.data, "run"), integer(incident.data, "rank"))
        return over if over is not False or rank is None else calm(incident, view, rank)

    return healed


def run_over(incident: Incident, view: View) -> bool | None:
    """The same for incidents that a later generation does not end: False while the run has live ranks here."""
    over = run_recovered(incident, view)
    return False if over and any(rank.live for rank in ranks_of(view, text(incident.data, "run"))) else over


def unsolved(view: View, kind: str) -> Iterator[Event]:
    """Events of one kind whose run has not recovered, and those too young for that to hide them."""
    ended_well: dict[tuple[str, int], bool | None] = {}
    for event in view.events(kind, REMEMBERED_S):
        which = text(event.data, "run"), integer(event.data, "generation")
        if view.wall - event.at <= FRESH_S:
            yield event
            continue
        if which not in ended_well:
            ended_well[which] = recovered(view, *which)
        if ended_well[which] is False:
            yield event


def unsolved_by_run(view: View, kind: str) -> dict[tuple[str, int], list[Event]]:
    """The same by run and generation."""
    return grouped(unsolved(view, kind), lambda event: (text(event.data, "run"), integer(event.data, "generation")))


def downtime(view: View, event: Event, last_step_at: float) -> Cost:
    """The cost of a stop of the whole job: its GPUs from the last step before it to the first after it.

    The cost ends when the launcher gives the run up.
    """
    run, generation = text(event.data, "run"), integer(event.data, "generation")
    back = resumed_event(view, run, generation)
    ends = run_events(view, "finished", run)
    over = back or next((end for end in ends if integer(end.data, "generation") >= generation), None)
    world = world_size(view, run)
    seconds = max(0.0, (over.at if over else view.wall) - last_step_at)
    lost = integer(back.data, "lost_steps", 0) if back else 0
    gpu_seconds = seconds * world + lost * step_seconds(ranks_of(view, run)) * world
    steps = f", {counted(lost, 'step')} to do again" if lost else ""
    return Cost(
        throughput_ratio=0.0 if over else 1.0,
        gpu_seconds=gpu_seconds,
        text=f"{counted(world, 'GPU')} stood still for {seconds:.1f} s{steps}",
    )


def run_finding(
    view: View, leader: RankFact, *facts: str, summary: str, culprit: Culprit, confidence: float,
    cost: str | Cost, severity: Severity = Severity.WARNING, key: str = "", source: str = "rank pages", **data: object,
) -> Finding:  # fmt: skip
    """What is wrong with ``leader``'s run, one finding a run unless there is a ``key``; empty facts are left out."""
    return Finding(
        key=key or leader.run,
        severity=severity,
        summary=summary,
        culprit=culprit,
        confidence=confidence,
        evidence=said(view, source, *facts),
        cost=Cost(text=cost) if isinstance(cost, str) else cost,
        job=leader.job,
        data={"run": leader.run, "rank": leader.rank, "generation": leader.generation, **data},
    )


def world_size(view: View, run: str) -> int:
    """Ranks of the whole job, at least 1."""
    fact = run_of(view, run)
    sizes = [rank.world_size for rank in ranks_of(view, run)] + ([fact.world_size] if fact else [])
    sizes += [integer(start.data, "world_size", 1) for start in run_events(view, "generation_started", run)]
    return max(sizes, default=1)


def live_ranks(view: View, run: str | None = None) -> list[RankFact]:
    """The ranks here whose process lives, of one run or of all."""
    return [rank for rank in (view.ranks if run is None else ranks_of(view, run)) if rank.live]


def live_leaders(view: View) -> Iterator[RankFact]:
    """The leaders whose process lives."""
    return (leader for leader in leaders(view) if leader.live)


def leaders(view: View) -> Iterator[RankFact]:
    """One rank of each run for values that are equal on all, like the loss: the lowest with a completed step."""
    for run in sorted({rank.run for rank in view.ranks}):
        stepped = [rank for rank in ranks_of(view, run) if rank.steps]
        if stepped:
            yield min(stepped, key=lambda rank: (-rank.generation, rank.rank))


def steps_lost(view: View, run: str, steps: int, text: str) -> Cost:
    """The cost of ``steps`` of the whole run. ``text`` has places for ``steps`` and ``gpus``."""
    world = world_size(view, run)
    said = text.format(steps=counted(steps, "step"), gpus=counted(world, "GPU"))
    return Cost(gpu_seconds=steps * step_seconds(ranks_of(view, run)) * world, text=said)


def last_step(rank: RankFact) -> int:
    """The number of the rank's last completed step, -1 before the first."""
    return rank.steps[-1].step if rank.steps else -1


def step_seconds(ranks: Sequence[RankFact]) -> float:
    """The usual duration of a step in seconds, 0.0 before there are any."""
    durations = sorted(step.duration_s for rank in ranks for step in rank.steps)
    return durations[len(durations) // 2] if durations else 0.0


def gpu_hours(leader: RankFact, since: int) -> float:
    """The GPU-hours that the run has computed since the step ``since``."""
    return max(0, leader.steps[-1].step - since) * step_seconds([leader]) * leader.world_size / 3600


def job_of(view: View, run: str) -> str:
    """The scheduler's job of ``run``, "" outside one."""
    fact = run_of(view, run)
    return fact.job if fact else next((rank.job for rank in ranks_of(view, run)), "")


def user_of(view: View, run: str) -> int | None:
    """The user whose run it is, None if that is not known."""
    facts = [run_of(view, run), *ranks_of(view, run)]
    return next((fact.user for fact in facts if fact is not None and fact.user is not None), None)


def quoted(event: Event, source: str, *sentences: str) -> tuple[Evidence, ...]:
    """Sentences taken from ``event`` as evidence; empty ones are left out."""
    return tuple(Evidence(sentence, source, event.at) for sentence in sentences if sentence)


def log_lines(data: Mapping[str, object]) -> list[str]:
    """The last three lines of the rank's log that the launcher kept, oldest first."""
    return [line.rstrip() for line in text(data, "log_tail").splitlines() if line.strip()][-3:]


def last_step_at(data: Mapping[str, object], fallback: float) -> float:
    """Wall second of the last step before a failure as the launcher reports it."""
    at = number(data, "last_step_t")
    return fallback if at is None else min(at, fallback)


ON_GPU = "opsd_gpu_job_info"
JOB = "opsd_slurm_job_info"


def with_job(finding: Finding, view: View) -> Finding:
    """``finding`` about a GPU with the job that has it, if the runbook names none, and with whose that job is.

    Of several jobs on one GPU, as with MIG, none is named; they are in the evidence.
    """
    gpu = finding.culprit.gpu
    if gpu is None or finding.culprit.node not in (None, view.node):
        return finding
    jobs = sorted(
        {series.labels["job_id"] for series in view.select(ON_GPU, gpu=str(gpu)) if series.last is not None} - {""}
    )
    if not jobs or jobs == [finding.job]:
        return finding
    told = Evidence(f"GPU {gpu} belongs to {_named(jobs, view)}", "Slurm and the driver", view.wall)
    job = finding.job or (jobs[0] if len(jobs) == 1 else "")
    return replace(finding, job=job, evidence=(*finding.evidence, told))


def owner(job: str, view: View) -> str:
    """The user whose job it is, "" if Slurm does not tell."""
    return next((series.labels["user"] for series in view.select(JOB, job_id=job) if series.last is not None), "")


def is_halted(job: str, view: View) -> bool:
    """Whether Slurm has halted the job, so that it can do nothing."""
    found = (series.labels["state"] for series in view.select(JOB, job_id=job) if series.last is not None)
    return not {"suspended", "stopped"}.isdisjoint(found)


def _named(jobs: Sequence[str], view: View) -> str:
    whose = [f"{job} of {user}" if (user := owner(job, view)) else job for job in jobs]
    return f"job{'s' * (len(jobs) > 1)} {', '.join(whose)}"
