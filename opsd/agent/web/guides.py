"""The guides of runbooks and alerts as pages. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from opsd.agent.brief import fill
from opsd.agent.web.html import Html, card, document, h, join, link
from opsd.runbooks import NAMES
from opsd.runbooks.lib.guides import SECTIONS, Guide, guides


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
