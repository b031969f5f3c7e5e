"""Incidents as lists: equal ones are one row, with the GPUs or ranks that have them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from opsd.agent.brief import Brief, brief, cost_now
from opsd.agent.correlate import joint_gpu_seconds, symptoms_of
from opsd.agent.lifecycle import holder, who_has_it
from opsd.agent.loop import Snapshot
from opsd.agent.web.api import newest_first
from opsd.agent.web.html import TONES, Html, card, h, join, link, nothing, pill
from opsd.runbooks.base import Incident, Severity, State
from opsd.runbooks.lib.guides import guides
from opsd.words import gpu_time, plural, ranges, span

MAX_GROUPS: Final = 8
MAX_ENDED: Final = 4
MAX_MEMBERS: Final = 16
MAX_LISTED: Final = 6
"""Number of sentences of evidence, actions and symptoms shown for an incident; its page has them all."""

Group = Sequence[Incident]


@dataclass(frozen=True, slots=True)
class Listing:
    """The incidents of a page, newest first. ``node`` is the agent's own, ``mode_of`` the policy's mode of a kind."""

    known: Sequence[Incident]
    wall: float
    node: str
    mode_of: Callable[[str], str] = lambda _kind: "observe"

    @classmethod
    def of(cls, snapshot: Snapshot, node: str, known: Sequence[Incident] | None = None) -> Listing:
        """All incidents of ``snapshot``, or those ``known`` of them."""
        return cls(newest_first(snapshot) if known is None else known, snapshot.wall, node, snapshot.mode_of)

    def roots(self) -> list[Incident]:
        """Those whose cause is not listed."""
        ids = {i.id for i in self.known}
        return [i for i in self.known if i.cause not in ids]

    def symptoms(self, group: Group) -> list[Incident]:
        """The symptoms of all incidents of ``group``."""
        return [symptom for i in group for symptom in symptoms_of(i.id, self.known)]

    def brief(self, incident: Incident) -> Brief:
        """What the person on call needs first."""
        return brief(incident, self.mode_of(incident.kind), self.node, self.symptoms([incident]))


def incident_path(incident: Incident) -> str:
    """The URL of an incident's page."""
    return f"/incident/{quote(incident.id, safe='')}"


def job_path(job: str, run: str) -> str:
    """The URL of a job's page, or of a run without a job."""
    return f"/job/{quote(job or run, safe='')}"


def grouped(incidents: Iterable[Incident]) -> list[Group]:
    """Incidents of one kind and severity, and either all open or all over, are a group, of whatever runs.

    Gravest groups first, then in the order of ``incidents``.
    """
    groups: dict[tuple[object, ...], list[Incident]] = {}
    for i in incidents:
        groups.setdefault((i.kind, i.severity, i.resolved_at is None), []).append(i)
    severities = [*TONES]
    return sorted(groups.values(), key=lambda group: severities.index(group[0].severity))


def open_card(listing: Listing) -> Html:
    """The open incidents with details, the gravest first, and the cost of all of them."""
    open_ones = [i for i in listing.roots() if i.resolved_at is None]
    if not open_ones:
        return card("incidents", "Open incidents", nothing("None is open."))
    groups = grouped(open_ones)
    rest = len(groups) - MAX_GROUPS
    more = nothing(f"{plural(rest, 'more kind')}: /api/v1/incidents?state=current") if rest > 0 else Html("")
    lost = joint_gpu_seconds([*open_ones, *listing.symptoms(open_ones)])
    total = nothing(f"Together they have cost {gpu_time(lost)} so far.") if lost and len(open_ones) > 1 else Html("")
    body = join(_group(group, listing) for group in groups[:MAX_GROUPS])
    return card("incidents", "Open incidents", join((body, more, total)))


def ended_card(listing: Listing) -> Html:
    """The last incidents that are over; empty without any."""
    ended = grouped(i for i in listing.roots() if i.resolved_at is not None)
    latest = sorted(ended, key=lambda group: -_end(group))[:MAX_ENDED]
    return (
        card("ended", "Incidents that are over", join(_group(group, listing) for group in latest))
        if ended
        else Html("")
    )


def page_tone(incidents: Iterable[Incident]) -> str:
    """The tone of the gravest open incident, "good" without any."""
    open_ones = {incident.severity for incident in incidents if incident.resolved_at is None}
    return next((tone or "warn" for severity, tone in TONES.items() if severity in open_ones), "good")


def title_of(kind: str) -> str:
    """The title of the runbook of ``kind``."""
    guide = guides().get(kind)
    return guide.title if guide else kind.replace("_", " ")


def done(action: Mapping[str, object]) -> str:
    """An action and its result."""
    said = f"{action.get('verb', '')} {action.get('target', '')}: {action.get('outcome', '')}"
    return f"{said} ({action['detail']})" if action.get("detail") else said


def severity_pill(incident: Incident) -> Html:
    """The severity, in its colour while the incident lasts."""
    return pill(incident.severity.value, TONES[incident.severity] if incident.resolved_at is None else "")


def holder_pills(group: Group) -> Html:
    """Who has incidents of the group."""
    acks = (holder(i) for i in group if i.resolved_at is None)
    return join(pill(f"{name} has it") for name in dict.fromkeys(ack.by for ack in acks if ack is not None))


def state_pills(group: Group) -> Html:
    """The states in the group: escalated ones wait for a person."""
    tones = {State.RESOLVED: "good", State.ESCALATED: "bad"}
    return join(
        pill(state.value, tones.get(state, "") if group[0].resolved_at is None or state is State.RESOLVED else "")
        for state in dict.fromkeys(i.state for i in group)
    )


def _end(group: Group) -> float:
    return max(i.resolved_at or 0.0 for i in group)


def _group(group: Group, listing: Listing) -> Html:
    first, over = group[0], group[0].resolved_at is not None
    began = listing.wall - (_end(group) if over else min(i.opened_at for i in group))
    said = first.summary if len(group) == 1 else f"{title_of(first.kind)}: {_members(group)}"
    when = h(f" – {f'ended {span(began)} ago' if over else f'for {span(began)}'}")
    head = join((severity_pill(first), state_pills(group), holder_pills(group), said, when))
    body = _details(first, listing) if len(group) == 1 else _several(group, listing)
    unfold = not over and first.severity is not Severity.INFO
    return Html(f"<details{' open' if unfold else ''}><summary>{head}</summary>{body}</details>")


def _members(group: Group) -> str:
    """The subjects of a group's incidents: ``8 GPUs (0–7)``, ``3 ranks (1, 4, 5)``, ``2 incidents``."""
    ranks = [i.culprit.rank for i in group] if len(_runs(group)) < 2 else []
    for noun, numbers in (("GPU", [i.culprit.gpu for i in group]), ("rank", ranks)):
        known = sorted({number for number in numbers if number is not None})
        if len(known) == len(group):
            return f"{plural(len(known), noun)} ({ranges(known, '–')})"
    runs = _runs(group)
    return plural(len(group), "incident") + (f" of {len(runs)} runs" if len(runs) > 1 else "")


def _runs(group: Group) -> list[tuple[str, str]]:
    """The different jobs and runs of a group."""
    return [*dict.fromkeys((i.job, i.run) for i in group if i.job or i.run)]


def _member(incident: Incident, wall: float, *, named: bool) -> str:
    """The difference of an incident from the others of its group; ``named`` if they are of several runs."""
    culprit = incident.culprit
    if culprit.gpu is not None:
        return f"GPU {culprit.gpu}"
    if culprit.rank is not None:
        return f"rank {culprit.rank}{f' of {incident.run or incident.job}' if named else ''}"
    return f"{span(wall - incident.opened_at)} ago"


def _several(group: Group, listing: Listing) -> Html:
    symptoms = listing.symptoms(group)
    lost = joint_gpu_seconds([*group, *symptoms])
    members = sorted(group, key=lambda i: (i.culprit.gpu or 0, i.culprit.rank or 0, i.opened_at))
    named = len(_runs(group)) > 1
    each: list[object] = [link(incident_path(i), _member(i, listing.wall, named=named)) for i in members[:MAX_MEMBERS]]
    if len(group) > len(each):
        each.append(f"and {len(group) - len(each)} more")
    return _rows(
        (
            ("Such as", group[0].summary),
            ("Cost", f"{gpu_time(lost)} together" if lost else ""),
            *_who_acts(members, listing),
            ("Each", join(each, ", ")),
            *_where(group),
            ("Symptoms", bullets(_some([symptom.summary for symptom in symptoms]))),
            ("Runbook", link(f"/runbooks/{quote(group[0].kind)}", title_of(group[0].kind))),
        )
    )


def _details(incident: Incident, listing: Listing) -> Html:
    symptoms = listing.symptoms([incident])
    evidence = [f"{evidence.text} – {span(listing.wall - evidence.newest)} ago" for evidence in incident.evidence]
    return _rows(
        (
            ("Cost", cost_now(incident, symptoms)),
            *_who_acts([incident], listing),
            ("Who has it", who_has_it(incident)),
            ("Culprit", f"{incident.culprit} ({incident.confidence:.0%} sure)"),
            *_where([incident]),
            ("Evidence", bullets(_some(evidence))),
            ("Done", bullets(_some([done(action) for action in incident.actions]))),
            ("Symptoms", bullets(_some([symptom.summary for symptom in symptoms]))),
            ("Verdict", incident.verdict),
            ("Runbook", link(f"/runbooks/{quote(incident.kind)}", title_of(incident.kind))),
            ("Page", link(incident_path(incident), "timeline, similar incidents, runbook")),
        )
    )


def _who_acts(members: Group, listing: Listing) -> list[tuple[str, object]]:
    """Who acts, and the next command for the first of ``members``; empty once they are over."""
    if members[0].resolved_at is not None:
        return []
    told = [listing.brief(i) for i in members[:MAX_MEMBERS]]
    acts = _some([*dict.fromkeys(each.acts for each in told)])
    return [("Who acts", acts[0] if len(acts) == 1 else bullets(acts)), *next_command(told[0])]


def next_command(told: Brief) -> list[tuple[str, object]]:
    """The command with the node on which it runs; one click selects it whole."""
    return [(f"Next, on {told.on}", Html(f'<pre class="command">{h(told.command)}</pre>'))]


def _where(group: Group) -> list[tuple[str, object]]:
    jobs, runs = ([*dict.fromkeys(filter(None, names))] for names in ([i.job for i in group], [i.run for i in group]))
    return [
        ("Job", join([link(job_path(job, ""), job) for job in jobs[:MAX_LISTED]], ", ")),
        ("Run", join([link(job_path("", run), run) for run in runs[:MAX_LISTED]], ", ")),
    ]


def _rows(rows: Iterable[tuple[str, object]]) -> Html:
    return Html(f"<dl>{''.join(f'<dt>{h(name)}</dt><dd>{h(value)}</dd>' for name, value in rows if value)}</dl>")


def _some(texts: Sequence[str]) -> list[str]:
    return [*texts[:MAX_LISTED], *([f"and {len(texts) - MAX_LISTED} more"] if len(texts) > MAX_LISTED else [])]


def bullets(items: Sequence[object]) -> Html:
    """A list; nothing for none."""
    return Html(f"<ul>{''.join(f'<li>{h(item)}</li>' for item in items)}</ul>") if items else Html("")
