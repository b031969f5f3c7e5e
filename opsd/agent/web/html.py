"""HTML from values. Everything that is not marked as HTML is escaped. No page needs a script or another file.

Also the parts that pages share: ranks, states of runs, and durations.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from statistics import median
from typing import Final

from opsd.charts import CHART_STYLE
from opsd.collectors.base import RankFact, RunFact
from opsd.runbooks.base import Severity
from opsd.words import span

MAX_TEXT: Final = 240
"""Characters of a text that are shown, as users and drivers may write any length."""
MAX_WHOLE: Final = 24
"""Characters of a cell of ``stacked_table`` that are not broken over lines."""
MAX_BESIDE: Final = 3
"""Columns of short cells that a narrow screen has room for."""

_OWN_STYLE: Final = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b1f24;--soft:#5b6470;--line:#dfe3e8;--link:#0b5cad;
--good:#176f3d;--warn:#8a5200;--bad:#b3261e;--good-bg:#e3f4ea;--warn-bg:#fdf0d9;--bad-bg:#fce8e6;--none-bg:#eceff2}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1c2026;--ink:#e7eaee;--soft:#a2abb6;--line:#333a43;
--link:#7fb8f5;--good:#7ddba3;--warn:#f2bf6d;--bad:#ff9b92;--good-bg:#14301f;--warn-bg:#362708;--bad-bg:#3f1714;--none-bg:#2a3038}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
header,main,footer{max-width:76rem;margin:0 auto;padding:.75rem 1rem}
h1{font-size:1.35rem;margin:.25rem 0}h2{font-size:1.05rem;margin:0 0 .5rem}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-99rem}.skip:focus{position:static}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.8rem 1rem;margin:0 0 1rem}
.facts{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;color:var(--soft);margin:0;padding:0;list-style:none}
.facts b{color:var(--ink)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
tr:last-child>td,tr:last-child>th{border-bottom:0}
thead th{color:var(--soft);font-weight:600}
.whole{white-space:nowrap}
.brief{display:inline-block;max-width:16rem;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;vertical-align:bottom}
.pill{display:inline-block;border-radius:99px;padding:0 .6rem;background:var(--none-bg);font-size:.85rem}
.good{color:var(--good);background:var(--good-bg)}.warn{color:var(--warn);background:var(--warn-bg)}
.bad{color:var(--bad);background:var(--bad-bg)}
svg{vertical-align:middle;margin-left:.5rem}polyline{fill:none;stroke:var(--link);stroke-width:1.5}
details{border-top:1px solid var(--line);padding:.5rem 0}details:first-of-type{border-top:0}
summary{cursor:pointer}summary .pill{margin-right:.4rem}
dl{display:grid;grid-template-columns:6rem 1fr;gap:.2rem .8rem;margin:.5rem 0 0 1rem}dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}dd ul{margin:0;padding-left:1.1rem}.none{color:var(--soft);margin:0}
code{overflow-wrap:anywhere}
@media(min-width:40rem){td:last-child,th:last-child{white-space:normal}}
.sentences td:last-child{overflow-wrap:anywhere}
.text{white-space:normal;overflow-wrap:anywhere}
article{max-width:46rem}article pre{overflow-x:auto}
@media(max-width:40rem){body{font-size:14px}td svg{display:none}th,td{padding-right:.6rem}
.sentences th,.sentences td{white-space:normal}.sentences td:last-child{min-width:8rem}
.stack thead{display:none}.stack tr,.stack th,.stack td{display:block;white-space:normal;overflow-wrap:anywhere}
.stack th,.stack td{padding:.1rem 0;border:0}.stack tr{padding:.3rem 0;border-bottom:1px solid var(--line)}
.stack tr:last-child{border:0}.stack td svg{display:block;margin:0;max-width:100%}
.stack [data-label]::before{content:attr(data-label) ": ";color:var(--soft);font-weight:400}
header,main,footer{padding:.5rem}dl{grid-template-columns:1fr;gap:0;margin-left:.5rem}dd{margin-bottom:.3rem}}
.beside{display:grid;grid-template-columns:minmax(0,1fr);gap:0 1rem;align-items:start}
@media(min-width:64rem){.beside{grid-template-columns:minmax(0,3fr) minmax(0,2fr)}}
.first{border-width:2px;border-color:var(--link)}.first dl{margin:0}.first dt{margin-top:.2rem}
.command{margin:0;padding:.5rem .6rem;background:var(--none-bg);border-radius:6px;white-space:pre-wrap;
overflow-wrap:anywhere;user-select:all;font:13px/1.5 ui-monospace,monospace}
.guide{max-width:none;overflow-wrap:anywhere}.facts li{overflow-wrap:anywhere}
figure{margin:0}figcaption{font-weight:600;font-size:.9rem}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,30rem),1fr));gap:1rem}
"""
STYLE: Final = _OWN_STYLE + CHART_STYLE + "@media(max-width:40rem){.chart{font-size:14px}}"
ICON_TONES: Final = {"good": "176f3d", "warn": "d98e04", "bad": "c62828", "": "5b6470"}
STYLE_HASH: Final = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS: Final = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
"""Browsers run and load nothing from a page, even if a user managed to inject HTML; its icon is part of it."""

_IN_URL: Final = str.maketrans({"<": "%3C", ">": "%3E", "#": "%23"})
_ESCAPES: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
"""As html.escape, whose module takes a quarter of a megabyte for its names of characters."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def h(value: object) -> Html:
    """``value`` as HTML: shortened, without control characters, escaped; HTML stays as it is."""
    if isinstance(value, Html):
        return value
    text = "".join(c if c.isprintable() else " " for c in str(value))
    shown = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    return Html(shown.encode("utf-8", "replace").decode().translate(_ESCAPES))


def join(parts: Iterable[object], between: str = "") -> Html:
    """The parts as HTML, one after the other."""
    return Html(between.join(h(part) for part in parts))


def pill(text: object, tone: str = "") -> Html:
    """A short text with a tone: good, warn, bad or none. The text must be clear without the colour."""
    return Html(f'<span class="pill {tone}">{h(text)}</span>')


def brief(text: str) -> Html:
    """A text on one line, cut where its cell ends; a pointer that rests on it shows all of it."""
    return Html(f'<span class="brief" title="{h(text)}">{h(text)}</span>') if text else Html("")


def whole(body: Html) -> Html:
    """What is not broken over lines."""
    return Html(f'<span class="whole">{body}</span>')


def link(href: str, text: object) -> Html:
    """A link."""
    return Html(f'<a href="{h(href)}">{h(text)}</a>')


def card(id: str, title: str, body: object) -> Html:
    """A section with a heading."""
    return Html(f'<section class="card" aria-labelledby="{id}"><h2 id="{id}">{h(title)}</h2>{h(body)}</section>')


def nothing(text: str) -> Html:
    """The text in place of an empty list."""
    return Html(f'<p class="none">{h(text)}</p>')


def stacked_table(label: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    """A table that fits its page: long cells break their lines.

    On narrow screens the cells of a row are below each other, unless the table is narrow itself.
    """
    wide = len(columns) > MAX_BESIDE or any(_is_long(cell) for row in (columns, *rows) for cell in row)
    head = "".join(_cell("th", column, " scope=col") for column in columns)
    labels = [f' data-label="{h(column)}"' if column else "" for column in columns]
    body = "".join(
        f"<tr>{_cell('th', row[0], f' scope=row{labels[0]}')}"
        f"{''.join(_cell('td', cell, label) for cell, label in zip(row[1:], labels[1:], strict=True))}</tr>"
        for row in rows
    )
    return Html(
        f'<div class="{"stack" if wide else "fits"}"><table aria-label="{h(label)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(tag: str, value: object, attributes: str) -> str:
    return f"<{tag}{attributes}{' class=text' * _is_long(value)}>{h(value)}</{tag}>"


def _is_long(value: object) -> bool:
    return not isinstance(value, Html) and len(str(value)) > MAX_WHOLE


def table(label: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, sentences: bool = False) -> Html:
    """A table that scrolls on narrow screens; the first cell of a row is its heading.

    One of ``sentences`` breaks its lines instead.
    """
    head = "".join(f'<th scope="col">{h(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{h(row[0])}</th>{"".join(f"<td>{h(cell)}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return Html(
        f'<div class="scroll{" sentences" * sentences}" role="group" tabindex="0" aria-label="{h(label)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names with their values, in one line."""
    items = "".join(f"<li>{h(name)} <b>{h(value)}</b></li>" for name, value in pairs)
    return Html(f'<ul class="facts">{items}</ul>')


def sparkline(values: Sequence[float], label: str) -> Html:
    """A sparkline of ``values``, scaled from lowest to highest; nothing for fewer than two."""
    width, height = 72, 18
    if len(values) < 2:
        return Html("")
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    last = len(values) - 1
    points = " ".join(
        f"{index * width / last:.0f},{1 + (height - 2) * (1 - (value - low) / span if high > low else 0.5):.0f}"
        for index, value in enumerate(values)
    )
    said = h(f"{label} from {low:g} to {high:g}")
    return Html(
        f'<svg width="{width}" height="{height}" role="img" aria-label="{said}"><polyline points="{points}"/></svg>'
    )


def _icon(tone: str) -> str:
    """The page's icon, a light in the colour of ``tone``."""
    color = ICON_TONES.get(tone, ICON_TONES[""])
    light = f"<circle cx='8' cy='8' r='7' fill='#{color}'/>"
    pulse = "<path d='M2 9h3l2-5 3 9 2-4h2' fill='none' stroke='#fff' stroke-width='1.6'/>"
    drawn = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>{light}{pulse}</svg>"
    return f'<link rel="icon" href="data:image/svg+xml,{drawn.translate(_IN_URL)}">'


def document(title: str, header: object, main: object, footer: object, *, refresh_s: int = 0, tone: str = "") -> bytes:
    """A complete page. It reloads itself after ``refresh_s`` seconds; 0: never. Its icon has the ``tone``."""
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{h(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{again}{_icon(tone)}<style>{STYLE}</style></head>"
        f'<body><a class="skip" href="#main">Skip to content</a><header>{h(header)}</header>'
        f'<main id="main">{h(main)}</main><footer>{h(footer)}</footer></body></html>'
    ).encode()


def problem_page(status: HTTPStatus, sentence: str) -> bytes:
    """The page in place of one that cannot be shown."""
    title = "Nothing is here" if status is HTTPStatus.NOT_FOUND else status.phrase
    ways = (link("/", "this node"), link("/fleet", "all nodes"), link("/runbooks", "runbooks"))
    said = Html(f'<p class="card">{h(sentence[:1].upper() + sentence[1:])}.</p>')
    return document(f"{title} – opsd", Html(f"<h1>{h(title)}</h1>"), said, join(ways, " · "))


MAX_RANKS: Final = 32
REFRESH_S: Final = (0, 5, 60)
"""After how many seconds a page may load itself again; 0 is never."""

STATE_TONES: Final = {"running": "good", "finished": "good", "failed": "bad", "spare": ""} | dict.fromkeys(
    ("waiting", "restarting", "stopping"), "warn"
)
"""States of a run's launcher."""
TONES: Final = {Severity.CRITICAL: "bad", Severity.WARNING: "warn", Severity.INFO: ""}


def ranks(ranks: Sequence[RankFact], now: float) -> Html:
    """A table of the ranks; ``now`` is the monotonic second of the request."""
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
    took = f"{last.duration_s:.3f} s" if last else "–"
    return (
        f"{rank.run} {rank.rank}",
        "–" if rank.gpu is None else rank.gpu,
        _rank_state(rank),
        rank.phase,
        span(now - rank.phase_since) if live else "–",
        last.step if last else "–",
        pill(took, "warn") if slow else took,
        "–" if rank.committed_step is None else rank.committed_step,
    )


def _rank_state(rank: RankFact) -> Html:
    if rank.state == "finished":
        return pill("finished", "good")
    if rank.process is None:
        return pill("gone", "bad")
    stopped = {"T": "stopped", "Z": "zombie"}.get(rank.process)
    return pill(stopped, "warn") if stopped else pill("running", "good")


def run_state(run: RunFact) -> Html:
    """The state of a run on this node, as a pill."""
    said = run_state_text(run)
    return pill(said, STATE_TONES.get(said, "bad"))


def run_state_text(run: RunFact) -> str:
    """The state of a run on this node. One that is over needs no launcher."""
    return run.state if run.alive or run.state in ("finished", "failed") else f"{run.state}, no launcher"


def phase_shares(ranks: Sequence[RankFact]) -> str:
    """The phases of the last steps by their share, largest first."""
    spent: dict[str, float] = {}
    for rank in ranks:
        for step in rank.steps:
            for phase, seconds in step.phase_s.items():
                spent[phase] = spent.get(phase, 0.0) + seconds
    total = sum(spent.values())
    shares = sorted(((seconds / total, phase) for phase, seconds in spent.items() if seconds > 0), reverse=True)
    return ", ".join(f"{phase} {share:.0%}" for share, phase in shares[:4] if share >= 0.005) or "–"
