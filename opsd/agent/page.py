"""The page of a node: incidents, GPUs, runs, ranks and collectors on one screen, complete without JavaScript.

It is made from a snapshot and the last minutes of a few series, and does nothing but show them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from collectors.base import GpuFact, RankFact, RunFact
from opsd import __version__
from opsd.agent.api import newest_first
from opsd.agent.correlate import symptoms_of
from opsd.agent.gather import Health
from opsd.agent.loop import Snapshot
from opsd.agent.page_history import LOSS, THROTTLED, TOKENS, History, current
from opsd.agent.page_html import Html, card, document, facts, h, join, link, nothing, pill, sparkline, table
from runbooks.base import Incident, Severity, State

MAX_INCIDENTS: Final = 8
MAX_ENDED: Final = 4
MAX_RANKS: Final = 32
MAX_RUNS: Final = 8
MAX_LISTED: Final = 6
"""Sentences of evidence, actions and symptoms shown of an incident; the API has them all."""
REFRESH_S: Final = (0, 5, 60)

_TONES: Final = {Severity.CRITICAL: "bad", Severity.WARNING: "warn", Severity.INFO: ""}
_HEALTH: Final = {Health.OK: "good", Health.ERROR: "bad", Health.HUNG: "bad"}


def node_page(snapshot: Snapshot, history: History, about: Mapping[str, Any], *, refresh_s: int, now: float) -> bytes:
    """The page of this node as UTF-8. ``now`` is the monotonic second of the request."""
    node = about.get("node", "")
    parts = (
        _incidents(snapshot),
        _gpus(snapshot, history),
        _runs(snapshot, history),
        _ranks(snapshot.ranks, now),
        _collectors(snapshot),
    )
    header = join((Html(f"<h1>{h(node)}</h1>"), _summary(snapshot, about, now)))
    return document(f"{node} – opsd", header, join(parts), _footer(refresh_s), refresh_s=refresh_s)


def _summary(snapshot: Snapshot, about: Mapping[str, Any], now: float) -> Html:
    roots = [i for i in snapshot.incidents if i.cause is None]
    worst = min((list(_TONES).index(i.severity) for i in roots), default=None)
    state = (
        pill("no incident", "good")
        if worst is None
        else pill(_count(len(roots), "incident"), [*_TONES.values()][worst])
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
            ("agent", f"opsd {__version__}, up {_span(snapshot.wall - float(about.get('started_at', snapshot.wall)))}"),
            *journal,
        ]
    )


def _incidents(snapshot: Snapshot) -> Html:
    known = newest_first(snapshot)
    ids = {i.id for i in known}
    roots = [i for i in known if i.cause not in ids]
    severe = {severity: number for number, severity in enumerate(_TONES)}
    open_ones = sorted((i for i in roots if i.resolved_at is None), key=lambda i: severe[i.severity])
    ended = [i for i in roots if i.resolved_at is not None]
    body = join(_incident(i, symptoms_of(i.id, known), snapshot.wall, unfold=True) for i in open_ones[:MAX_INCIDENTS])
    rest = len(open_ones) - MAX_INCIDENTS
    more = nothing(f"{rest} more: /api/v1/incidents?state=current") if rest > 0 else Html("")
    past = join(_incident(i, symptoms_of(i.id, known), snapshot.wall, unfold=False) for i in ended[:MAX_ENDED])
    return join(
        (
            card("incidents", "Open incidents", join((body, more)) if open_ones else nothing("None is open.")),
            card("ended", "Incidents that are over", past) if ended else Html(""),
        )
    )


def _incident(incident: Incident, symptoms: Sequence[Incident], wall: float, *, unfold: bool) -> Html:
    over = incident.resolved_at is not None
    state = pill(incident.state.value, "good" if incident.state is State.RESOLVED else "")
    tone = "" if over else _TONES[incident.severity]
    ago = _span(wall - (incident.resolved_at if incident.resolved_at is not None else incident.opened_at))
    when = f"{'over for' if over else 'for'} {ago}"
    head = join((pill(incident.severity.value, tone), state, h(incident.summary), h(f" – {when}")))
    cost = incident.cost.text or (f"{incident.cost.gpu_seconds:.0f} GPU seconds" if incident.cost.gpu_seconds else "")
    rows = (
        ("Culprit", f"{incident.culprit} ({incident.confidence:.0%} sure)"),
        ("Costs", cost),
        ("Job", incident.job),
        ("Evidence", _list(evidence.text for evidence in incident.evidence)),
        ("Done", _list(_done(action) for action in incident.actions)),
        ("Symptoms", _list(symptom.summary for symptom in symptoms)),
        ("Verdict", incident.verdict),
        ("Page", link(f"/runbooks/{incident.kind}", f"runbook {incident.kind}")),
        ("All of it", link(f"/api/v1/incidents/{incident.id}", incident.id)),
    )
    body = "".join(f"<dt>{name}</dt><dd>{h(value)}</dd>" for name, value in rows if value)
    return Html(f"<details{' open' if unfold else ''}><summary>{head}</summary><dl>{body}</dl></details>")


def _done(action: Mapping[str, object]) -> str:
    said = f"{action.get('verb', '')} {action.get('target', '')}: {action.get('outcome', '')}"
    return f"{said} ({action['detail']})" if action.get("detail") else said


def _list(texts: Iterable[str]) -> Html:
    every = [*texts]
    shown = every[:MAX_LISTED]
    if len(every) > len(shown):
        shown.append(f"and {len(every) - len(shown)} more")
    return Html(f"<ul>{''.join(f'<li>{h(text)}</li>' for text in shown)}</ul>") if shown else Html("")


def _gpus(snapshot: Snapshot, history: History) -> Html:
    if not snapshot.gpus:
        nvml = next((source for source in snapshot.sources if source.name == "nvml"), None)
        return card("gpus", "GPUs", nothing(nvml.reason if nvml and nvml.reason else "No GPU is known."))
    values = current(snapshot)
    users = {rank.gpu: rank for rank in snapshot.ranks if rank.live}
    simulated = " (simulated)" if all(gpu.simulated for gpu in snapshot.gpus) else ""
    columns = ("GPU", "State", "Throttled", "Temperature", "Power", "SM clock", "Busy", "Rank")
    rows = [_gpu(gpu, users.get(gpu.index), values, history) for gpu in snapshot.gpus]
    return card("gpus", f"GPUs{simulated}", table("GPUs", columns, rows))


def _gpu(
    gpu: GpuFact, rank: RankFact | None, values: Mapping[tuple[str, str], float], history: History
) -> Sequence[object]:
    def drawn(name: str, unit: str) -> Html:
        series, value = f"DCGM_FI_DEV_{name}", values.get((f"DCGM_FI_DEV_{name}", gpu.uuid))
        if value is None:
            return h("–")
        label = f"GPU {gpu.index}, {name.lower().replace('_', ' ')}"
        return join((f"{value:.0f} {unit}", sparkline(history.values(series, gpu.uuid), label)))

    state = pill("ok", "good") if gpu.lost is None else pill(f"lost: {gpu.lost}", "bad")
    if gpu.orphans:
        state = join((state, pill(f"held by dead {', '.join(map(str, gpu.orphans))}", "warn")), " ")
    return (
        gpu.index,
        state,
        _throttled(history.values(THROTTLED, gpu.uuid), history.every_s),
        drawn("GPU_TEMP", "°C"),
        drawn("POWER_USAGE", "W"),
        drawn("SM_CLOCK", "MHz"),
        drawn("GPU_UTIL", "%"),
        f"{rank.rank} of {rank.run}" if rank else "–",
    )


def _throttled(counter: Sequence[float], every_s: float) -> Html:
    """The share of the last minute, from a counter of seconds."""
    recent = counter[-1 - round(60 / every_s) :]
    if len(recent) < 2:
        return h("–")
    share = min(1.0, max(0.0, recent[-1] - recent[0]) / (every_s * (len(recent) - 1)))
    return pill(f"{share:.0%}", "bad" if share >= 0.1 else "warn" if share >= 0.02 else "good")


def _runs(snapshot: Snapshot, history: History) -> Html:
    if not snapshot.runs:
        return card("runs", "Runs", nothing("No run is supervised on this node."))
    columns = (
        "Run",
        "Job",
        "State",
        "Generation",
        "Tokens/s",
        "Loss",
        "Checkpoint",
        "Where the time of its steps goes",
    )
    rows = [_run(run, snapshot, history) for run in snapshot.runs[:MAX_RUNS]]
    return card("runs", "Runs and checkpoints", table("Runs", columns, rows))


def _run(run: RunFact, snapshot: Snapshot, history: History) -> Sequence[object]:
    ranks = [rank for rank in snapshot.ranks if rank.run == run.run]
    values = current(snapshot)
    saved = [rank.committed_step for rank in ranks if rank.committed_step is not None]
    steps = [rank.steps[-1].step for rank in ranks if rank.steps]
    tokens, loss = values.get((TOKENS, run.run)), values.get((LOSS, run.run))
    behind = f"step {min(saved)}, {max(steps) - min(saved)} behind" if saved and steps else "none yet"
    state = (
        pill(run.state, "good")
        if run.alive
        else pill(f"{run.state}, no launcher", "bad" if run.state == "running" else "")
    )
    return (
        run.run,
        run.job or "–",
        state,
        run.generation,
        join((f"{tokens:,.0f}", sparkline(history.values(TOKENS, run.run), "tokens per second"))) if tokens else "–",
        join((f"{loss:.4g}", sparkline(history.values(LOSS, run.run), "loss"))) if loss is not None else "–",
        behind,
        _ledger(ranks),
    )


def _ledger(ranks: Sequence[RankFact]) -> str:
    """The phases of the last steps by their share, largest first; `opsd ledger` accounts for the whole run."""
    spent: dict[str, float] = {}
    for rank in ranks:
        for step in rank.steps:
            for phase, seconds in step.phase_s.items():
                spent[phase] = spent.get(phase, 0.0) + seconds
    total = sum(spent.values())
    shares = sorted(((seconds / total, phase) for phase, seconds in spent.items() if seconds > 0), reverse=True)
    return ", ".join(f"{phase} {share:.0%}" for share, phase in shares[:4] if share >= 0.005) or "–"


def _ranks(ranks: Sequence[RankFact], now: float) -> Html:
    if not ranks:
        return card("ranks", "Ranks", nothing("No rank is on this node."))
    usual = {run: _usual([r for r in ranks if r.run == run]) for run in {r.run for r in ranks}}
    columns = ("Rank", "GPU", "State", "Phase", "For", "Step", "Step time", "Saved")
    rows = [_rank(rank, usual[rank.run], now) for rank in ranks[:MAX_RANKS]]
    more = nothing(f"and {len(ranks) - MAX_RANKS} more: /api/v1/ranks") if len(ranks) > MAX_RANKS else Html("")
    return card("ranks", "Ranks", join((table("Ranks", columns, rows), more)))


def _usual(ranks: Sequence[RankFact]) -> float:
    """The median of the ranks' last step times, 0 if there is none."""
    times = [rank.steps[-1].duration_s for rank in ranks if rank.steps]
    return median(times) if times else 0.0


def _rank(rank: RankFact, usual_s: float, now: float) -> Sequence[object]:
    last = rank.steps[-1] if rank.steps else None
    slow = last is not None and usual_s > 0 and last.duration_s > 1.2 * usual_s
    live = rank.live and rank.process not in ("Z", "T")
    state = (
        pill("running", "good")
        if live
        else pill({"T": "stopped", "Z": "zombie"}.get(rank.process or "", rank.state), "warn")
    )
    took = f"{last.duration_s:.3f} s" if last else "–"
    return (
        f"{rank.run} {rank.rank}",
        "–" if rank.gpu is None else rank.gpu,
        state,
        rank.phase,
        _span(now - rank.phase_since) if live else "–",
        last.step if last else "–",
        pill(took, "warn") if slow else took,
        "–" if rank.committed_step is None else rank.committed_step,
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
            for path in ("/runbooks/", "/metrics", "/api/v1/status", "/api/v1/incidents", "/api/v1/ranks")
        ),
        " · ",
    )
    return Html(f"<p>Load this page again: {again}</p><nav aria-label='More'>{places}</nav>")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _span(seconds: float) -> str:
    """A length of time in words: 4 s, 12 min, 3 h 20 min, 2 d 4 h."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
