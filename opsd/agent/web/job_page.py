"""The page of a job: problems, where its time went, its runs, then nodes, ranks and speed. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final

from opsd.agent.loop import Snapshot
from opsd.agent.web.api import newest_first
from opsd.agent.web.fleet import IncidentSummary, NodeOfJob, OtherNodes
from opsd.agent.web.history import LOSS, TOKENS, History, gpu_charts, run_charts
from opsd.agent.web.html import (
    MAX_RANKS,
    MAX_TEXT,
    STATE_TONES,
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
    run_state_text,
    sparkline,
    table,
)
from opsd.agent.web.incidents import MAX_GROUPS, Listing, ended_card, open_card, page_tone
from opsd.agent.web.ledgers import LedgerResult, beside_of, forecast_of
from opsd.agent.web.node_page import slowdown_limit
from opsd.collectors.base import RankFact, RunFact
from opsd.plan.forecast import told
from opsd.runbooks.base import Incident
from opsd.words import span

MFU: Final = "opsd_rank_mfu_ratio"
ROUTER: Final = tuple(f"opsd_rank_router_{part}_ratio" for part in ("load", "load_limit", "entropy", "dropped"))
GRAD_NORM: Final = "opsd_rank_grad_norm"
LEARNING_RATE: Final = "opsd_rank_learning_rate"

MAX_NODES: Final = 32
"""Number of other nodes that are listed; the sums include all."""
ALONE: Final[OtherNodes[NodeOfJob]] = OtherNodes(
    note="Only this node is known: agents ask each other where Slurm runs and agent.listen is no loopback address."
)
TONES_BY_NAME: Final = {severity.value: tone for severity, tone in TONES.items()}

Values = Mapping[tuple[str, str, str], float]
"""Newest value of a series by its name, run and rank."""


def job_page(
    snapshot: Snapshot,
    history: History,
    ledger_of: Callable[[RunFact], LedgerResult],
    id: str,
    node: str,
    now: float,
    others_of: Callable[[str], OtherNodes[NodeOfJob]] | None = None,
) -> bytes | None:
    """The page of the job or run ``id`` as UTF-8, None if none of its runs is on this node.

    ``now`` is the monotonic second of the request. ``others_of`` returns a job's other nodes; None if unavailable.
    """
    runs, of_job = _of_job(snapshot, id)
    here = node_of_job(snapshot, id, node, now)
    if here is None:
        return None
    values = _values(snapshot)
    told = _incidents(snapshot, id, runs)
    listing = Listing.of(snapshot, node, told)
    made = [(run, ledger_of(run)) for run in runs]
    parts = [
        open_card(listing),
        *(_ledger(run, ledger) for run, ledger in made),
        *(part for run, ledger in made for part in _run_parts(run, of_job, snapshot, history, ledger, told)),
        _nodes(here, others_of(runs[0].job) if others_of else ALONE),
        ranks(of_job, now),
        _speed(of_job, values),
        ended_card(listing),
    ]
    title = f"job {id}" if any(run.job == id for run in runs) else f"run {id}"
    header = join((Html(f"<h1>{h(title)}</h1>"), facts([("node", node), ("seen", f"{now - snapshot.at:.1f} s ago")])))
    footer = join(
        (link("/", "this node"), link("/runbooks/", "runbooks"), link("/api/v1/ranks", "/api/v1/ranks")), " · "
    )
    return document(f"{title} – opsd", header, join(parts), footer, tone=page_tone(told))


def _run_parts(
    run: RunFact, of_job: Sequence[RankFact], snapshot: Snapshot, history: History, made: LedgerResult,
    told: Sequence[Incident],
) -> Iterator[Html]:  # fmt: skip
    here = [rank for rank in of_job if rank.run == run.run]
    gpus = [gpu for gpu in snapshot.gpus if gpu.index in {rank.gpu for rank in here}]
    yield _run(run, here, _values(snapshot), history, made)
    yield run_charts(run, here, history, made.ledger, told, snapshot.wall)
    yield gpu_charts(gpus, history, told, snapshot.wall, limit_c=slowdown_limit(snapshot))


def node_of_job(snapshot: Snapshot, id: str, node: str, now: float) -> NodeOfJob | None:
    """This node's summary of the job or run ``id`` at the monotonic second ``now``; None if no run of it is here."""
    runs, ranks = _of_job(snapshot, id)
    if not runs:
        return None
    last = [rank.steps[-1] for rank in ranks if rank.steps]
    tokens = [
        value
        for (name, run, _), value in _values(snapshot).items()
        if name == TOKENS and run in {run.run for run in runs}
    ]
    live = [rank for rank in ranks if rank.live]
    current = [i for i in _incidents(snapshot, id, runs) if i.resolved_at is None and i.cause is None]
    return NodeOfJob(
        node=node,
        state=run_state_text(runs[0]),
        generation=runs[0].generation,
        ranks=len(ranks),
        live=len(live),
        step=max((step.step for step in last), default=None),
        step_s=max((step.duration_s for step in last), default=None),
        silent_s=max((max(0.0, now - rank.changed) for rank in live), default=None),
        tokens_per_second=sum(tokens) if tokens else None,
        incidents=tuple(
            IncidentSummary(severity=i.severity.value, summary=i.summary[:200]) for i in current[:MAX_GROUPS]
        ),
    )


def _of_job(snapshot: Snapshot, id: str) -> tuple[list[RunFact], list[RankFact]]:
    """The runs and ranks of the job or run ``id`` on this node."""
    runs = [run for run in snapshot.runs if id and id in (run.job, run.run)]
    names = {run.run for run in runs}
    return runs, [rank for rank in snapshot.ranks if rank.run in names]


def _incidents(snapshot: Snapshot, id: str, runs: Sequence[RunFact]) -> list[Incident]:
    """The incidents of the job or run ``id``, newest first.

    A job has those of its own number, and those without a job of its runs; a run has all of its name, over all its
    jobs, and those of its job that name no run.
    """
    names, jobs = {run.run for run in runs}, {run.job for run in runs if run.job}

    def concerns(incident: Incident) -> bool:
        if id in jobs:
            return incident.job == id or (not incident.job and incident.run in names)
        return incident.run in names or (not incident.run and incident.job in jobs)

    return [incident for incident in newest_first(snapshot) if concerns(incident)]


def _nodes(here: NodeOfJob, others: OtherNodes[NodeOfJob]) -> Html:
    """A row for each node of the job: those with incidents first, then those that do not answer."""
    asked = sorted(
        others.answers, key=lambda answer: (not (answer.summary and answer.summary.incidents), bool(answer.summary))
    )
    rows = [
        _node(h(here.node), here),
        *(
            _node(link(f"{answer.url}/", answer.node), answer.summary)
            if answer.summary
            else (link(f"{answer.url}/", answer.node), pill("not known", "warn"), *"–––––", answer.problem)
            for answer in asked[:MAX_NODES]
        ),
    ]
    left = len(asked) - MAX_NODES
    told = [here, *(answer.summary for answer in asked if answer.summary)]
    total = facts(
        [
            ("nodes", f"{len(told)} of {1 + len(asked)} answer"),
            ("ranks alive", f"{sum(node.live for node in told)} of {sum(node.ranks for node in told)}"),
            ("tokens/s", f"{sum(node.tokens_per_second or 0.0 for node in told):,.0f}"),
        ]
    )
    columns = ("Node", "Run", "Ranks alive", "Step", "Slowest step", "Longest silence", "Tokens/s", "Incidents")
    more = nothing(f"and {left} more") if left > 0 else Html("")
    note = nothing(others.note) if others.note else Html("")
    return card("nodes", "Nodes of the job", join((total, table("Nodes of the job", columns, rows), more, note)))


def _node(name: Html, node: NodeOfJob) -> Sequence[object]:
    equal = Counter((i.severity, i.summary) for i in node.incidents)
    told = join(
        (
            join((pill(severity, TONES_BY_NAME.get(severity, "")), f"{summary}{f' ({n} times)' if n > 1 else ''}"), " ")
            for (severity, summary), n in equal.items()
        ),
        "; ",
    )
    return (
        name,
        pill(node.state, STATE_TONES.get(node.state, "warn")),
        f"{node.live} of {node.ranks}",
        "–" if node.step is None else node.step,
        "–" if node.step_s is None else f"{node.step_s:.3f} s",
        "–" if node.silent_s is None else span(node.silent_s),
        "–" if node.tokens_per_second is None else f"{node.tokens_per_second:,.0f}",
        told if node.incidents else "none",
    )


def _values(snapshot: Snapshot) -> Values:
    found = snapshot.select(TOKENS, LOSS, MFU, GRAD_NORM, LEARNING_RATE, *ROUTER)
    return {(metric.name, labels[0], labels[1]): value for metric, value, labels in found}


def _run(run: RunFact, here: Sequence[RankFact], values: Values, history: History, made: LedgerResult) -> Html:
    def of(name: str) -> list[float]:
        return [value for (metric, owner, _), value in values.items() if metric == name and owner == run.run]

    tokens, loss, mfu, rate = of(TOKENS), of(LOSS), of(MFU), of(LEARNING_RATE)
    routers = [of(name) for name in ROUTER]
    saved = [rank.committed_step for rank in here if rank.committed_step is not None]
    steps = [rank.steps[-1].step for rank in here if rank.steps]
    times = [rank.steps[-1].duration_s for rank in here if rank.steps]
    pairs: list[tuple[str, object]] = [
        ("state", run_state(run)),
        ("generation", run.generation),
        ("ranks here", f"{len(here)} of {run.world_size}"),
        ("step", max(steps) if steps else "–"),
        ("step time", f"{max(times):.3f} s (slowest rank)" if times else "–"),
        ("tokens/s here", _drawn(sum(tokens), ",.0f", history.values(TOKENS, run.run), "tokens/s") if tokens else "–"),
        ("MFU", f"{fmean(mfu):.1%}" if mfu else "–"),
        ("loss", _drawn(fmean(loss), ".4g", history.values(LOSS, run.run), "loss") if loss else "–"),
        ("learning rate", f"{max(rate):.3g}" if rate else "–"),
        ("checkpoint", f"step {min(saved)}" if saved else "none yet"),
        *([("routers", _routers(*map(max, routers)))] if all(routers) else []),
        *_trackers((made.ledger or {}).get("places")),
    ]
    return card(f"run-{h(run.run)}", f"Run {run.run}", facts(pairs))


def _trackers(found: object) -> Iterator[tuple[str, object]]:
    """Links to the run in trackers of experiments. The user of the run has written it."""
    known = found if isinstance(found, Mapping) else {}
    url, folder = str(known.get("wandb", "")), known.get("tensorboard")
    if url.startswith(("https://", "http://")) and len(url) <= MAX_TEXT:
        yield "Weights & Biases", link(url, url.partition("://")[2])
    if folder:
        yield "TensorBoard", Html(f"<code>{h(shlex.join(('tensorboard', '--logdir', str(folder))))}</code>")


def _routers(load: float, limit: float, entropy: float, dropped: float) -> str:
    return f"fullest expert {load:.3g} x the mean (at most {limit:.3g}), entropy {entropy:.0%}, {dropped:.1%} dropped"


def _drawn(value: float, form: str, past: Sequence[float], label: str) -> Html:
    return join((format(value, form), sparkline(past, label)))


def _speed(of_job: Sequence[RankFact], values: Values) -> Html:
    if not of_job:
        return Html("")

    def cell(rank: RankFact, name: str, form: str) -> str:
        value = values.get((name, rank.run, str(rank.rank)))
        return "–" if value is None else format(value, form)

    rows = [
        (
            f"{rank.run} {rank.rank}",
            cell(rank, TOKENS, ",.0f"),
            cell(rank, MFU, ".1%"),
            cell(rank, LOSS, ".4g"),
            cell(rank, GRAD_NORM, ".3g"),
            phase_shares([rank]),
        )
        for rank in of_job[:MAX_RANKS]
    ]
    columns = ("Rank", "Tokens/s", "MFU", "Loss", "Gradient norm", "Time per phase")
    return card("speed", "Speed and learning", table("Speed and learning", columns, rows))


def _ledger(run: RunFact, made: LedgerResult) -> Html:
    title = f"Where the time of {run.run} went"
    if made.ledger is None:
        return card(f"ledger-{h(run.run)}", title, nothing(f"No ledger: {made.problem}"))
    wall = made.ledger["wall_s"] or 1.0
    rows = [
        (name.replace("_", " "), span(seconds), f"{seconds / wall:.1%}")
        for name, seconds in made.ledger["buckets"].items()
        if seconds
    ]
    summary = facts(
        [
            ("ETTR", f"{made.ledger['ettr']:.1%}"),
            ("wall clock", span(made.ledger["wall_s"])),
            ("generations", made.ledger["generations"]),
            ("steps", made.ledger["steps"]),
        ]
    )
    found = forecast_of(made.ledger)
    shown = [*(told(found) if found else ()), *beside_of(made.ledger).items()]
    outlook = facts(shown) if shown else Html("")
    notes = join(nothing(f"Note: {note}") for note in made.ledger["notes"])
    body = join((summary, outlook, table(title, ("Bucket", "Time", "Share"), rows), notes))
    return card(f"ledger-{h(run.run)}", title, body)
