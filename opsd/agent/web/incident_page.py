"""The page of an incident: what happened when, on what evidence, what was like it, and what to do. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote

from opsd.agent.brief import Brief, brief, fill, values
from opsd.agent.correlate import symptoms_of
from opsd.agent.loop import Snapshot
from opsd.agent.similar_incidents import Similar, nearest
from opsd.agent.web import api
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
from opsd.runbooks import NAMES
from opsd.runbooks.base import Incident
from opsd.runbooks.lib.guides import SECTIONS, Guide, guides
from opsd.words import clock, span


def runbook_page(name: str) -> bytes | None:
    """The page of the runbook or alert ``name`` as UTF-8, None if there is none."""
    guide = guides().get(name)
    return None if guide is None else _document(name, guide)


def runbook_list() -> bytes:
    """The list of all pages as UTF-8."""
    found = _list((name, guide) for name, guide in guides().items() if name in NAMES)
    raised = _list((name, guide) for name, guide in guides().items() if name not in NAMES)
    main = join((card("kinds", "Incidents", found), card("alerts", "Alerts that only Prometheus can raise", raised)))
    return document("runbooks – opsd", Html("<h1>Runbooks</h1>"), main, _HOME)


_CODE: Final = re.compile(r"<code>.*?</code>", re.DOTALL)
_HOME = link("/", "this node")


def _list(named: Iterable[tuple[str, Guide]]) -> Html:
    items = "".join(f"<li>{link(f'/runbooks/{name}', guide.title)}</li>" for name, guide in named)
    return Html(f"<ul>{items}</ul>")


def _document(name: str, guide: Guide) -> bytes:
    header = Html(f"<h1>{h(guide.title)}</h1>")
    footer = join((link("/runbooks/", "all runbooks"), _HOME, name), " · ")
    return document(
        f"{guide.title} – opsd", header, Html(f'<article class="card">{guide_body(guide)}</article>'), footer
    )


@lru_cache(maxsize=8)
def guide_body(guide: Guide) -> Html:
    """The sections of a guide, with headings of the second level."""
    texts = (guide.meaning, guide.impact, guide.diagnosis, guide.mitigation, guide.automatic)
    return Html("".join(f"<h2>{head}</h2>{_html(text)}" for head, text in zip(SECTIONS, texts, strict=True)))


def filled_guide(guide: Guide, known: Mapping[str, str]) -> Html:
    """The sections of a guide whose commands have the ``known`` values in place of their placeholders."""
    return Html(_CODE.sub(lambda code: fill(code[0], known, lambda value: str(h(value))), guide_body(guide)))


def _html(markdown: str) -> Html:
    """Markdown as HTML; tags in it are shown and not obeyed."""
    from markdown_it import MarkdownIt  # 3 MiB that an agent pays once somebody reads a page

    return Html(MarkdownIt("commonmark", {"html": False}).render(markdown))


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
