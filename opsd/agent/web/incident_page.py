"""The page of an incident: what happened when, on what evidence, what was like it, and what to do. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote

from opsd.agent.brief import Brief, brief, values
from opsd.agent.correlate import symptoms_of
from opsd.agent.loop import Snapshot
from opsd.agent.similar_incidents import Similar, nearest
from opsd.agent.web import api
from opsd.agent.web.guides import filled_guide
from opsd.agent.web.html import Html, card, document, facts, h, join, link, nothing, table
from opsd.agent.web.incidents import (
    bullets,
    done,
    incident_path,
    job_path,
    next_command,
    page_tone,
    severity_pill,
    state_pills,
    title_of,
)
from opsd.runbooks.base import Incident
from opsd.runbooks.lib.guides import guides
from opsd.words import clock, span

MAX_EVENTS: Final = 100


class Moment(NamedTuple):
    """Something that happened at an epoch second; ``said`` is text or HTML."""

    at: float
    what: str
    said: str


def incident_page(snapshot: Snapshot, incident: Incident, node: str) -> bytes:
    """The page of ``incident`` as UTF-8."""
    known = api.newest_first(snapshot)
    symptoms = symptoms_of(incident.id, known)
    cause = next((other for other in known if other.id == incident.cause), None)
    title = title_of(incident.kind)
    header = join((Html(f"<h1>{h(incident.summary)}</h1>"), _facts(incident, cause, node, snapshot.wall)))
    box = _box(brief(incident, snapshot.mode_of(incident.kind), node, symptoms))
    told = join((box, _timeline(timeline(incident, symptoms)), _symptoms(symptoms), _similar(nearest(incident, known))))
    body = Html(f'<div class="beside"><div>{told}</div>{_guide(incident, node)}</div>')
    footer = join(
        (
            link("/", "this node"),
            link(f"/runbooks/{quote(incident.kind)}", f"runbook {incident.kind}"),
            link(f"/api/v1/incidents/{quote(incident.id, safe='')}", "as JSON"),
            incident.id,
        ),
        " · ",
    )
    return document(f"{title} on {node} – opsd", header, body, footer, tone=page_tone([incident]))


def timeline(incident: Incident, symptoms: Sequence[Incident]) -> list[Moment]:
    """All that is known of its course, oldest first."""
    return sorted(_moments(incident, symptoms), key=lambda moment: moment.at)


def _moments(incident: Incident, symptoms: Sequence[Incident]) -> Iterator[Moment]:
    for evidence in incident.evidence:
        again = f" (last at {clock(evidence.last)})" if evidence.last is not None else ""
        yield Moment(evidence.at, f"seen by {evidence.source}", f"{evidence.text}{again}")
    yield Moment(incident.opened_at, "opened", incident.summary)
    for action in incident.actions:
        if (at := _number(action, "at")) is not None:
            yield Moment(at, "action", " – ".join(filter(None, (done(action), str(action.get("reason") or "")))))
        if (ended := _number(action, "ended_at")) is not None:
            yield Moment(ended, "action ended", f"{action.get('verb', '')}: {action.get('outcome', '')}")
    for symptom in symptoms:
        yield Moment(symptom.opened_at, "symptom", link(incident_path(symptom), symptom.summary))
    if incident.reopened_at is not None:
        yield Moment(incident.reopened_at, "came back", f"{incident.relapses}. time")
    if incident.healthy_since is not None and incident.resolved_at is None:
        yield Moment(incident.healthy_since, "healthy", "not over yet: it has to stay so")
    if (ack := incident.ack) is not None:
        until = "" if ack.until is None else f", until {clock(ack.until)}"
        yield Moment(ack.at, "acknowledged", f"by {ack.by}{until}")
        if ack.over_at is not None:
            yield Moment(ack.over_at, "no longer acknowledged", f"{ack.by} has it no more")
    if incident.resolved_at is not None:
        yield Moment(incident.resolved_at, "over", incident.verdict)


def _number(action: Mapping[str, object], name: str) -> float | None:
    value = action.get(name)
    return float(value) if isinstance(value, int | float) else None


def _facts(incident: Incident, cause: Incident | None, node: str, wall: float) -> Html:
    over = incident.resolved_at
    lasted = span((wall if over is None else over) - incident.opened_at)
    pairs: list[tuple[str, object]] = [
        ("severity", severity_pill(incident)),
        ("state", state_pills([incident])),
        ("node", link("/", node)),
        ("culprit", f"{incident.culprit} ({incident.confidence:.0%} sure)"),
        ("lasted" if over is not None else "for", lasted),
        ("job", link(job_path(incident.job, ""), incident.job) if incident.job else ""),
        ("run", link(job_path("", incident.run), incident.run) if incident.run else ""),
        ("symptom of", link(incident_path(cause), cause.summary) if cause else ""),
        ("verdict", incident.verdict),
    ]
    return facts([(name, value) for name, value in pairs if value])


def _timeline(moments: Sequence[Moment]) -> Html:
    rows = [(_clock(moment.at), moment.what, moment.said) for moment in moments[:MAX_EVENTS]]
    listed = table("Timeline", ("Time", "What", "Said"), rows, sentences=True)
    return card("timeline", "Timeline and evidence", listed)


def _symptoms(symptoms: Sequence[Incident]) -> Html:
    if not symptoms:
        return Html("")
    listed = [join((severity_pill(s), " ", link(incident_path(s), s.summary))) for s in symptoms]
    return card("symptoms", "Symptoms", bullets(listed))


def _similar(found: Sequence[Similar]) -> Html:
    helped = {True: "yes", False: "no", None: "nothing was tried"}
    rows = [
        (
            link(incident_path(similar.incident), similar.incident.summary),
            _clock(similar.incident.opened_at),
            f"{similar.similarity:.0%}",
            ", ".join(similar.done) or "–",
            helped[similar.helped],
        )
        for similar in found
    ]
    columns = ("Incident", "Opened", "Alike", "Done", "Helped")
    body = table("Similar incidents", columns, rows) if rows else nothing("None is remembered on this node.")
    return card("similar", "Similar past incidents", body)


def _box(told: Brief) -> Html:
    """What the person on call reads first. The command is selected whole by one click."""
    rows = (
        ("What happened", told.happened),
        ("What it costs now", told.cost),
        ("Who acts", told.acts),
        *([("Who has it", told.owner)] if told.owner else []),
        *next_command(told),
    )
    body = "".join(f"<dt>{h(name)}</dt><dd>{h(value)}</dd>" for name, value in rows)
    heading = '<h2 id="first">Do this first</h2>'
    return Html(f'<section class="card first" aria-labelledby="first">{heading}<dl>{body}</dl></section>')


def _guide(incident: Incident, node: str) -> Html:
    guide = guides().get(incident.kind)
    if guide is None:
        return Html("")
    body = filled_guide(guide, values(incident, node))
    return Html(f'<article class="card guide" aria-label="Runbook: {h(guide.title)}">{body}</article>')


def _clock(at: float) -> Html:
    """Local time, with the date in full for those who hover."""
    moment = time.localtime(at)
    form = "%H:%M:%S" if time.time() - at < 86_400 else "%Y-%m-%d %H:%M:%S"
    full = time.strftime("%Y-%m-%dT%H:%M:%S%z", moment)
    return Html(f'<time datetime="{full}" title="{full}">{time.strftime(form, moment)}</time>')
