"""The page of a node: problems, what is being done, then the inventory. It is complete without JavaScript.

It shows a snapshot and the last minutes of a few series. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from opsd import __version__
from opsd.agent.gather import Health
from opsd.agent.loop import Snapshot
from opsd.agent.web.api import JobOnGpus, cost_text, jobs_on_gpus, newest_first, outcome, repair_now
from opsd.agent.web.history import LOSS, THROTTLED, TOKENS, History, current, gpu_charts
from opsd.agent.web.html import (
    REFRESH_S,
    TONES,
    Html,
    card,
    document,
    facts,
    h,
    join,
    link,
    nothing,
    phase_shares,
    pill,
    ranks,
    run_state,
    sparkline,
    table,
)
from opsd.agent.web.incidents import Listing, ended_card, incident_path, open_card, page_tone
from opsd.collectors.base import GpuFact, RepairFact, RepairStep, RunFact
from opsd.runbooks.base import Incident
from opsd.words import plural, span

MAX_RUNS: Final = 8

_HEALTH: Final = {Health.OK: "good", Health.LIMITED: "warn", Health.ERROR: "bad", Health.HUNG: "bad"}


def node_page(snapshot: Snapshot, history: History, about: Mapping[str, Any], *, refresh_s: int, now: float) -> bytes:
    """The page of this node as UTF-8. ``now`` is the monotonic second of the request."""
    node = about.get("node", "")
    listing = Listing.of(snapshot, str(node))
    parts = (
        open_card(listing),
        repair_card(snapshot),
        _jobs(snapshot, about),
        _runs(snapshot, history),
        gpu_table(snapshot, history, str(node)),
        gpu_charts(snapshot.gpus, history, _of_gpus(snapshot), snapshot.wall, limit_c=slowdown_limit(snapshot)),
        ranks(snapshot.ranks, now),
        ended_card(listing),
        _collectors(snapshot),
    )
    header = join((Html(f"<h1>{h(node)}</h1>"), _summary(snapshot, about, now)))
    tone = page_tone(snapshot.incidents)
    return document(f"{node} – opsd", header, join(parts), _footer(refresh_s), refresh_s=refresh_s, tone=tone)


def _of_gpus(snapshot: Snapshot) -> list[Incident]:
    return [incident for incident in newest_first(snapshot) if incident.culprit.gpu is not None]


def _summary(snapshot: Snapshot, about: Mapping[str, Any], now: float) -> Html:
    roots = [i for i in snapshot.incidents if i.cause is None]
    worst = min((list(TONES).index(i.severity) for i in roots), default=None)
    state = (
        pill("no incident", "good") if worst is None else pill(plural(len(roots), "incident"), [*TONES.values()][worst])
    )
    if snapshot.tick < 0:
        state = pill("not ready: the first collection is not done yet", "warn")
    journal = [("journal", pill("not written: " + snapshot.journal_problem, "bad"))] if snapshot.journal_problem else []
    return facts(
        [
            ("state", state),
            ("policy", about.get("mode", "")),
            ("seen", f"{max(0.0, now - snapshot.at):.1f} s ago"),
            ("GPUs", len(snapshot.gpus)),
            ("ranks", len(snapshot.ranks)),
            *_spare(snapshot),
            *_repair(snapshot),
            ("agent", f"opsd {__version__}, up {span(snapshot.wall - float(about.get('started_at', snapshot.wall)))}"),
            *journal,
        ]
    )


def _spare(snapshot: Snapshot) -> list[tuple[str, object]]:
    """The state of this node as a spare; empty if it is none."""
    if (ready := snapshot.value("opsd_spare_ready")) is None:
        return []
    age = snapshot.value("opsd_spare_verified_age_seconds")
    verified = f", verified {span(age)} ago" if age is not None else ""
    return [("spare", pill(f"ready{verified}", "good") if ready else pill(f"not ready{verified}", "warn"))]


def _repair(snapshot: Snapshot) -> list[tuple[str, object]]:
    """The repair of this node; empty if there is none to speak of."""
    repair = repair_now(snapshot)
    return [("repair", pill(repair.text, "bad" if repair.age_s is None else "warn"))] if repair else []


def _jobs(snapshot: Snapshot, about: Mapping[str, Any]) -> Html:
    """Slurm's jobs with GPUs of this node, empty without any."""
    jobs = jobs_on_gpus(snapshot)
    if not jobs:
        return Html("")
    columns = ("Job", "User", "Partition", "GPUs", "Idle", "Idle cost")
    rows = [
        (
            job.job,
            job.user or "–",
            job.partition or "–",
            ", ".join(map(str, job.gpus)),
            _idle_gpus(job),
            cost_text(job.idle_gpu_hours, about) if job.idle_s else "–",
        )
        for job in jobs
    ]
    return card("jobs", "Slurm jobs on the GPUs", table("Slurm jobs on the GPUs", columns, rows))


def _idle_gpus(job: JobOnGpus) -> Html | str:
    if not job.idle_s:
        return "none"
    longest = span(max(job.idle_s.values()))
    return join((pill(f"{len(job.idle_s)} of {len(job.gpus)}", "warn"), f"for up to {longest}"), " ")


MAX_REPAIRS: Final = 5
REPAIR_TONES: Final = {"returned": "good", "rma": "bad", "left": "bad"}


def repair_card(snapshot: Snapshot) -> Html:
    """The newest repairs with what was done, newest first; empty without any."""
    if not snapshot.repairs:
        return Html("")
    rows = [_repair_row(repair, snapshot.wall) for repair in [*reversed(snapshot.repairs)][:MAX_REPAIRS]]
    columns = ("Repair", "Drained for", "What was done", "How it ended")
    return card("repairs", "Repairs of this node", table("Repairs", columns, rows, sentences=True))


def _repair_row(repair: RepairFact, wall: float) -> Sequence[object]:
    steps = join((_step(step) for step in repair.attempts), " ")
    said = join((pill(repair.state, REPAIR_TONES.get(repair.state, "warn")), repair.verdict), " ")
    return f"{span(wall - repair.opened_at)} ago", repair.reason, steps or "nothing yet", said


def _step(step: RepairStep) -> Html:
    """A step with its outcome in words: ``reset_gpus done``."""
    return pill(f"{step.what} {outcome(step.ok)}", {True: "good", False: "bad", None: "warn"}[step.ok])


def _runs(snapshot: Snapshot, history: History) -> Html:
    if not snapshot.runs:
        return card("runs", "Runs", nothing("No run is supervised on this node."))
    columns = ("Run", "Job", "State", "Generation", "Tokens/s", "Loss", "Checkpoint", "Time per phase")
    rows = [_run(run, snapshot, history) for run in snapshot.runs[:MAX_RUNS]]
    return card("runs", "Runs and checkpoints", table("Runs", columns, rows))


def _run(run: RunFact, snapshot: Snapshot, history: History) -> Sequence[object]:
    of_run = [rank for rank in snapshot.ranks if rank.run == run.run]
    values = current(snapshot)
    saved = [rank.committed_step for rank in of_run if rank.committed_step is not None]
    steps = [rank.steps[-1].step for rank in of_run if rank.steps]
    tokens, loss = values.get((TOKENS, run.run)), values.get((LOSS, run.run))
    behind = f"step {min(saved)}, {max(steps) - min(saved)} behind" if saved and steps else "none yet"
    return (
        link(f"/job/{quote(run.job or run.run, safe='')}", run.run),
        run.job or "–",
        run_state(run),
        run.generation,
        join((f"{tokens:,.0f}", sparkline(history.values(TOKENS, run.run), "tokens per second"))) if tokens else "–",
        join((f"{loss:.4g}", sparkline(history.values(LOSS, run.run), "loss"))) if loss is not None else "–",
        behind,
        phase_shares(of_run),
    )


def _collectors(snapshot: Snapshot) -> Html:
    rows = [
        (
            source.name,
            pill(source.health.value, _HEALTH.get(source.health, "")),
            len(source.reading.samples),
            f"{source.duration_s * 1e3:.1f} ms",
            source.reason or "–",
        )
        for source in snapshot.sources
    ]
    columns = ("Collector", "State", "Series", "Took", "Why")
    body = table("Collectors", columns, rows) if rows else nothing("No collection has been done yet.")
    return card("collectors", "What opsd sees with", body)


def _footer(refresh_s: int) -> Html:
    words = {0: "stay as it is", 5: "every 5 s", 60: "every minute"}
    again = join(
        (words[s] if s == refresh_s else link(f"/?refresh={s}" if s else "/", words[s]) for s in REFRESH_S), " · "
    )
    places = join(
        (
            link(path, path)
            for path in ("/fleet", "/runbooks/", "/metrics", "/api/v1/status", "/api/v1/incidents", "/api/v1/ranks")
        ),
        " · ",
    )
    return Html(f"<p>Load this page again: {again}</p><nav aria-label='More'>{places}</nav>")


THROTTLED_WARN, THROTTLED_BAD = 0.02, 0.1
"""Shares of the last minute."""
NEAR_LIMIT_C: Final = 5.0
USUAL_LIMIT_C: Final = 90.0
"""Assumed where the driver does not say at which temperature the GPU slows itself down."""

_TEMPERATURE: Final = "DCGM_FI_DEV_GPU_TEMP"
_MARGIN: Final = "opsd_gpu_temperature_margin_celsius"
_LIMIT: Final = "opsd_gpu_temperature_threshold_celsius"


def gpu_table(snapshot: Snapshot, history: History, node: str) -> Html:
    """All GPUs of this node."""
    if not snapshot.gpus:
        nvml = next((source for source in snapshot.sources if source.name == "nvml"), None)
        return card("gpus", "GPUs", nothing(nvml.reason if nvml and nvml.reason else "No GPU is known."))
    values, margins = current(snapshot), _margins(snapshot)
    users = {gpu: f"job {job.job}" for job in jobs_on_gpus(snapshot) for gpu in job.gpus}
    users |= {rank.gpu: f"{rank.rank} of {rank.run}" for rank in snapshot.ranks if rank.live and rank.gpu is not None}
    simulated = " (simulated)" if all(gpu.simulated for gpu in snapshot.gpus) else ""
    columns = ("GPU", "State", "Throttled", "Temperature", "Power", "SM clock", "Busy", "Rank or job")
    rows = [
        _row(
            gpu,
            gpu_state(gpu, _worst(snapshot, gpu.index, node), _throttled(history, gpu.uuid), margins.get(gpu.uuid)),
            users.get(gpu.index, "–"),
            values,
            history,
        )
        for gpu in snapshot.gpus
    ]
    return card("gpus", f"GPUs{simulated}", table("GPUs", columns, rows))


def gpu_state(gpu: GpuFact, incident: Incident | None, throttled: float | None, margin_c: float | None) -> Html:
    """The worst that is known of ``gpu``: lost, its ``incident``, throttled, hot; "ok" only if nothing is.

    ``throttled`` is the share of the last minute, ``margin_c`` the degrees left until the GPU slows itself down; None
    if unknown.
    """
    if gpu.lost is not None:
        state = pill(f"lost: {gpu.lost}", "bad")
    elif incident is not None:
        state = pill(link(incident_path(incident), incident.kind.replace("_", " ")), TONES[incident.severity])
    elif throttled is not None and throttled >= THROTTLED_WARN:
        state = pill("throttled", "bad" if throttled >= THROTTLED_BAD else "warn")
    elif margin_c is not None and margin_c <= NEAR_LIMIT_C:
        state = pill("at its heat limit", "bad") if margin_c <= 0 else pill("hot", "warn")
    elif margin_c is None and throttled is None:
        state = pill("answers, nothing measured", "warn")
    else:
        state = pill("ok", "good")
    if not gpu.orphans:
        return state
    return join((state, pill(f"held by dead {', '.join(map(str, gpu.orphans))}", "warn")), " ")


def _worst(snapshot: Snapshot, gpu: int, node: str) -> Incident | None:
    """The gravest open incident whose culprit is GPU ``gpu`` of this node."""
    severities = [*TONES]
    found = [
        incident
        for incident in newest_first(snapshot)
        if incident.resolved_at is None and incident.culprit.gpu == gpu and incident.culprit.node in (None, node)
    ]
    return min(found, key=lambda incident: severities.index(incident.severity), default=None)


def _margins(snapshot: Snapshot) -> dict[str, float]:
    """Degrees left until a GPU slows itself down, by UUID: what the driver says, or its limit less the temperature."""
    told: dict[str, float] = {}
    limits: dict[str, float] = {}
    temperatures: dict[str, float] = {}
    for metric, value, labels in snapshot.select(_MARGIN, _LIMIT, _TEMPERATURE):
        if metric.name == _MARGIN:
            told[labels[1]] = value
        elif metric.name == _TEMPERATURE:
            temperatures[labels[1]] = value
        elif labels[2] == "slowdown":
            limits[labels[1]] = value
    computed = {uuid: limits.get(uuid, USUAL_LIMIT_C) - value for uuid, value in temperatures.items()}
    return {**computed, **told}


def slowdown_limit(snapshot: Snapshot) -> float | None:
    """The lowest temperature at which a GPU of this node slows itself down, None if the driver does not say."""
    told = (value for _, value, labels in snapshot.select(_LIMIT) if labels[2] == "slowdown")
    return min(told, default=None)


def _throttled(history: History, uuid: str) -> float | None:
    """The share of the last minute, from a counter of seconds; None if too little is known."""
    recent = history.values(THROTTLED, uuid)[-1 - round(60 / history.every_s) :]
    if len(recent) < 2:
        return None
    return min(1.0, max(0.0, recent[-1] - recent[0]) / (history.every_s * (len(recent) - 1)))


def _row(
    gpu: GpuFact, state: Html, user: str, values: Mapping[tuple[str, str], float], history: History
) -> Sequence[object]:
    def drawn(name: str, unit: str) -> Html:
        series, value = f"DCGM_FI_DEV_{name}", values.get((f"DCGM_FI_DEV_{name}", gpu.uuid))
        if value is None:
            return h("–")
        label = f"GPU {gpu.index}, {name.lower().replace('_', ' ')}"
        return join((f"{value:.0f} {unit}", sparkline(history.values(series, gpu.uuid), label)))

    share = _throttled(history, gpu.uuid)
    tone = "good" if share is None or share < THROTTLED_WARN else "bad" if share >= THROTTLED_BAD else "warn"
    return (
        gpu.index,
        state,
        h("–") if share is None else pill(f"{share:.0%}", tone),
        drawn("GPU_TEMP", "°C"),
        drawn("POWER_USAGE", "W"),
        drawn("SM_CLOCK", "MHz"),
        drawn("GPU_UTIL", "%"),
        user,
    )
