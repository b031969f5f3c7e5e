"""The page of all nodes: their problems first, then state, runs and spares of each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import quote

from opsd.agent.web.fleet import Answer, FleetView, NodeSummary, OtherNodes
from opsd.agent.web.html import (
    STATE_TONES,
    TONES,
    Html,
    brief,
    card,
    document,
    facts,
    h,
    join,
    link,
    nothing,
    pill,
    stacked_table,
    table,
    whole,
)
from opsd.slurm.port import Node
from opsd.words import span

MAX_ROWS: Final = 256
MAX_PROBLEMS: Final = 16
STALE_S: Final = 10.0
ALONE: Final = FleetView(
    OtherNodes(
        note="Only this node is known: agents ask each other where Slurm runs and agent.listen is no loopback address."
    ),
    {},
)


def fleet_page(here: NodeSummary, view: FleetView, *, refresh_s: int) -> bytes:
    """The page as UTF-8. ``here`` is this node, the others are in ``view``; nodes in trouble come first."""
    answers = [Answer(here.node, "", here), *view.others.answers]
    asked = {answer.node for answer in answers}
    silent: list[Answer[NodeSummary]] = [Answer(name, "") for name in view.slurm if name not in asked]
    nodes = sorted((*answers, *silent), key=lambda answer: _trouble(answer, view.slurm.get(answer.node)))
    rows = [_row(answer, view.slurm.get(answer.node)) for answer in nodes[:MAX_ROWS]]
    columns = ("Node", "Incidents", "Agent", "GPUs", "Slurm", "Repair", "Spare", "Runs")
    rest = len(nodes) - len(rows)
    more = nothing(f"and {rest} more without trouble, or with less") if rest > 0 else Html("")
    note = nothing(view.others.note) if view.others.note else Html("")
    body = join((table("Nodes", columns, rows), more, note))
    header = join((Html("<h1>All nodes</h1>"), _sums([a.summary for a in answers if a.summary], len(nodes))))
    again = link("/fleet", "stay as it is") if refresh_s else link("/fleet?refresh=60", "load again every minute")
    footer = join((link("/", here.node), link("/runbooks/", "runbooks"), again), " · ")
    worst = {severity for a in answers if a.summary for severity in a.summary.incidents}
    tone = next((tone or "warn" for severity, tone in TONES.items() if severity.value in worst), "good")
    main = join((_problems(nodes), card("nodes", "Nodes", body)))
    return document("all nodes – opsd", header, main, footer, refresh_s=refresh_s, tone=tone)


def _problems(nodes: Sequence[Answer[NodeSummary]]) -> Html:
    """The nodes with critical incidents, lost GPUs, warnings or no answer: what, its cost, who acts."""
    rows = [
        (
            link(f"{answer.url}/", answer.node) if answer.url or answer.summary else answer.node,
            _problem(answer),
            (answer.summary and answer.summary.cost) or "–",
            (answer.summary.acts or "–") if answer.summary else "you act: see whether node and agent are up",
        )
        for answer in nodes
        if _in_trouble(answer)
    ]
    if not rows:
        return card("problems", "Problems", nothing("No node that answers has one."))
    listed = stacked_table("Problems", ("Node", "Gravest problem", "Costs now", "Who acts"), rows[:MAX_PROBLEMS])
    rest = len(rows) - MAX_PROBLEMS
    more = nothing(f"and {rest} more, listed below") if rest > 0 else Html("")
    return card("problems", "Problems", join((listed, more)))


def _in_trouble(answer: Answer[NodeSummary]) -> bool:
    known = answer.summary
    if known is None:
        return bool(answer.problem)
    grave = known.incidents.get("critical") or known.incidents.get("warning")
    return bool(grave or known.gpus_lost or known.age_s > STALE_S)


def _problem(answer: Answer[NodeSummary]) -> Html:
    known = answer.summary
    if known is None:
        return join((pill("no answer", "bad"), answer.problem), " ")
    stale = [pill(f"agent stands still for {span(known.age_s)}", "bad")] if known.age_s > STALE_S else []
    lost = [pill(f"{known.gpus_lost} GPUs lost", "bad")] if known.gpus_lost and not known.worst else []
    page = f"{answer.url}/incident/{quote(known.worst_id, safe='')}"
    worst = link(page, known.worst) if known.worst_id else h(known.worst)
    return join((*stale, *lost, *_counts(known), worst), " ")


def _sums(known: Sequence[NodeSummary], nodes: int) -> Html:
    def total(severity: str) -> int:
        return sum(node.incidents.get(severity, 0) for node in known)

    grave = [pill(f"{number} {s.value}", tone) for s, tone in TONES.items() if (number := total(s.value))]
    spares = [node.spare for node in known if node.spare is not None]
    repairs = sum(bool(node.repair) for node in known)
    running = {run.run for node in known for run in node.runs if run.state == "running"}
    lost = sum(node.gpus_lost for node in known)
    return facts(
        [
            ("nodes", f"{len(known)} of {nodes} answer"),
            ("GPUs", sum(node.gpus for node in known)),
            *([("lost", pill(lost, "bad"))] if lost else []),
            ("runs", len(running)),
            *([("in repair or to be replaced", repairs)] if repairs else []),
            ("incidents", join(grave, " ") if grave else pill("none", "good")),
            ("spares", f"{sum(spares)} of {len(spares)} ready" if spares else "none"),
        ]
    )


def _trouble(answer: Answer[NodeSummary], node: Node | None) -> tuple[object, ...]:
    """The order of rows: critical incidents and lost GPUs, silent agents, warnings, what Slurm does not use, others."""
    known = answer.summary
    return (
        not (known and (known.incidents.get("critical") or known.gpus_lost)),
        not (known is None or known.age_s > STALE_S),
        not (known and known.incidents.get("warning")),
        node is None or node.usable,
        answer.node,
    )


def _row(answer: Answer[NodeSummary], node: Node | None) -> Sequence[object]:
    known, name = answer.summary, link(f"{answer.url}/", answer.node)
    if known is None:
        silent = pill("no answer" if answer.problem else "not asked", "bad" if answer.problem else "")
        return h(answer.node), brief(answer.problem) or "–", silent, "–", _slurm(node), "–", "–", "–"
    fresh = known.age_s <= STALE_S
    agent = pill("answers", "good") if fresh else pill(f"stands still for {span(known.age_s)}", "bad")
    lost = join((f"{known.gpus} ", pill(f"{known.gpus_lost} lost", "bad"))) if known.gpus_lost else h(known.gpus)
    runs = join(_runs(known, answer.url), ", ") if known.runs else h("–")
    spare = {True: pill("ready", "good"), False: pill("not ready", "warn"), None: h("–")}[known.spare]
    return name, join(_counts(known), " ") or h("none"), agent, lost, _slurm(node), _repair(known), spare, runs


def _runs(known: NodeSummary, url: str) -> Iterator[Html]:
    for run in known.runs:
        where = f"{url}/job/{quote(run.job or run.run, safe='')}"
        said = f"{run.run} ({run.job})" if run.job and run.job not in run.run else run.run
        outlook = [pill("late", "warn")] if run.late else []
        outlook += [brief(run.outlook)] if run.outlook else []
        outlook += [brief(f"ablations: {run.ablations}")] if run.ablations else []
        tone = STATE_TONES.get(run.state, "bad")
        yield join((whole(join((link(where, said), pill(run.state, tone)), " ")), *outlook), " ")


def _counts(known: NodeSummary) -> list[Html]:
    return [
        pill(f"{number} {severity.value}", tone)
        for severity, tone in TONES.items()
        if (number := known.incidents.get(severity.value))
    ]


def _repair(known: NodeSummary) -> Html:
    lemon = [pill("lemon", "warn")] if known.lemon else []
    repair = [pill(known.repair, "bad" if known.repair.startswith("rma") else "warn")] if known.repair else []
    return join((*lemon, *repair), " ") if lemon or repair else h("–")


def _slurm(node: Node | None) -> Html:
    if node is None:
        return h("–")
    said = "+".join([node.state, *sorted(node.flags)])
    return join((pill(said, "" if node.usable else "warn"), brief(node.reason)), " ")
