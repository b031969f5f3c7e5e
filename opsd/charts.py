"""Line charts as SVG: axes with units, several series, spans of time, light and dark. Pure; no scripts, no files.

A page includes ``CHART_STYLE`` in its style sheet once. ``standalone`` makes a file of a chart that has its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Point = tuple[float, float]
Kind = Literal["number", "clock", "duration"]
Tone = Literal["bad", "warn", "none"]

_COLORS: Final = ("0b5cad", "b04a00", "176f3d", "8f1d6b", "5b2fb0", "0a6f7d", "6b5300", "4a5560")
_DARK: Final = ("7fb8f5", "f2a65e", "7ddba3", "f19bc9", "bfa4f5", "66cfdd", "e3cf6b", "b9c2cc")
_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3")
MAX_STYLES: Final = 32
"""So many lines of a chart differ in colour or dash."""
_LEGEND_ROW: Final = 18
_MAX_TEXT: Final = 80
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 36
_NAMES, _SAID, _ROW_HEIGHT = 200, 270, 22
"""Room for the names and the texts of a forest plot, and the height of a row of it."""
_LONGEST_NAME: Final = 26
_FEW_EFFECTS, _FAR = 8, 2.5
"""From so many effects on, the axis of a forest plot ends at this multiple of the third quartile of all ends."""
_CHARACTER: Final = 7.2
"""Width of a character of the legend, in the chart's units."""
_SECONDS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_DAY: Final = 86400
_SUFFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_LIMITS: Final = {"number": 1e100, "clock": 1e11, "duration": 1e11}
_ESCAPES: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})

CHART_STYLE: Final = (
    ".chart{display:block;width:100%;height:auto;margin:0;font:12px system-ui,sans-serif}"
    ".chart text{fill:#5b6470}.chart .grid{stroke:#dfe3e8}.chart .axis{stroke:#8a939d}"
    ".chart .line{fill:none;stroke-width:1.6;stroke-linejoin:round}.chart .strong{stroke-width:3.2}"
    ".chart .limit{fill:none;stroke:#b3261e;stroke-width:1.2}.chart text.limit{fill:#b3261e;stroke:none}"
    ".chart .dot{stroke:none}.chart .range{fill:none;stroke-width:1.6}.chart .name{fill:#1b1f24}"
    + "".join(f".chart .r{n}{{stroke:#{c};fill:#{c}}}" for n, c in enumerate(("176f3d", "b3261e", "0b5cad", "5b6470")))
    + ".chart .open{fill:none}.chart .band{fill:#0b5cad;fill-opacity:.1}"
    ".chart .span{fill-opacity:.16}.chart .bad{fill:#b3261e}.chart .warn{fill:#b07400}.chart .none{fill:#5b6470}"
    + "".join(f".chart .s{n}{{stroke:#{c}}}.chart .dot.s{n}{{fill:#{c}}}" for n, c in enumerate(_COLORS))
    + "@media(prefers-color-scheme:dark){.chart text{fill:#a2abb6}.chart .grid{stroke:#333a43}"
    ".chart .axis{stroke:#6b7580}.chart .span{fill-opacity:.26}"
    ".chart .bad{fill:#ff9b92}.chart .limit{stroke:#ff9b92}.chart text.limit{fill:#ff9b92}"
    ".chart .warn{fill:#f2bf6d}.chart .none{fill:#a2abb6}.chart .name{fill:#e7eaee}.chart .band{fill:#7fb8f5}"
    + "".join(f".chart .r{n}{{stroke:#{c};fill:#{c}}}" for n, c in enumerate(("7ddba3", "ff9b92", "7fb8f5", "a2abb6")))
    + ".chart .open{fill:none}"
    + "".join(f".chart .s{n}{{stroke:#{c}}}.chart .dot.s{n}{{fill:#{c}}}" for n, c in enumerate(_DARK))
    + "}"
)
"""The style sheet of all charts of a page."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line. ``points`` are in the order of x; the line is interrupted where one is not finite.

    A ``strong`` line is drawn thicker than the others: what an incident is about.
    """

    name: str
    points: Sequence[Point]
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Limit:
    """A value of the y axis that matters, drawn over the whole width and named at its right end."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the x axis that is shaded: an incident, a restart. ``label`` is shown when the mouse points at it."""

    start: float
    end: float
    label: str
    tone: Tone = "bad"


@dataclass(frozen=True, slots=True)
class Axis:
    """``label`` has the unit. ``clock`` values are epoch seconds, shown in local time; a ``duration`` is in seconds."""

    label: str = ""
    kind: Kind = "number"
    from_zero: bool = False
    low: float | None = None
    high: float | None = None
    """Limits in place of those of the data."""


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: Axis,
    y: Axis,
    spans: Sequence[Span] = (),
    limits: Sequence[Limit] = (),
    width: int = 720,
    height: int = 240,
) -> str:
    """The chart as an ``<svg>`` element, "" if no series has a finite point.

    ``title`` is read to those who do not see the chart, with the range and the last value of each series. Points that
    share a column of pixels are drawn as the first, lowest, highest and last of them.
    """
    pieces = [list(_pieces(each.points, x.kind, y.kind)) for each in series]
    finite = [[point for piece in of_one for point in piece] for of_one in pieces]
    flat = [point for points in finite for point in points]
    if not flat:
        return ""
    across = _Scale.over([p[0] for p in flat], x, _LEFT, width - _RIGHT, room=False)
    values = [p[1] for p in flat] + [limit.value for limit in limits]
    up = _Scale.over(values, y, height - _BOTTOM, _TOP, room=True)
    legend, rows = _legend(series, width, height)
    parts = [
        *(_span(each, across, height) for each in spans if across.low <= each.end and each.start <= across.high),
        *_axes(x, y, across, up, width, height),
        *(_line(number, each, pieces[number], across, up) for number, each in enumerate(series)),
        *(_limit(limit, up, width) for limit in limits),
        *legend,
    ]
    spoken = [_told(each.name, points, y) for each, points in zip(series, finite, strict=True) if points]
    told = "; ".join([*spoken, *(f"limit {limit.name} {limit.value:.4g} {y.label}".rstrip() for limit in limits)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height + rows * _LEGEND_ROW}" '
        f'role="img" aria-label="{_text(title, 200)}: {_text(told, 1200)}">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True, slots=True)
class Effect:
    """A row of a forest plot: a value with its interval, which may be infinite. ``said`` stands at the right end.

    ``mark`` is the form and the colour: 0 a disc, 1 a square, 2 a diamond, 3 an open circle.
    """

    name: str
    value: float
    low: float
    high: float
    mark: int
    said: str


def forest_plot(title: str, effects: Sequence[Effect], *, x: Axis, margin: float = 0.0, width: int = 1100) -> str:
    """Effects with their intervals, a row each, as an ``<svg>`` element; "" without a finite value.

    Zero has a line, and the ``margin`` on both sides of it a band. Intervals that are much longer than most end in an
    arrow.
    """
    reach = _reach([each for each in effects if math.isfinite(each.value)], margin)
    if not reach:
        return ""
    said = max(_SAID, 20 + _CHARACTER * max(len(_text(each.said)) for each in effects))
    left, right, bottom = _NAMES, width - said, _TOP + _ROW_HEIGHT * len(effects)
    wide = Axis(x.label, low=-reach, high=reach)
    across = _Scale.over([-reach, reach], wide, left, right, room=False)
    parts = [
        *([_band(across, margin, bottom)] if margin else []),
        *(_forest_tick(across, value, bottom) for value in across.ticks("number")),
        f'<text x="{right}" y="{bottom + 34}" text-anchor="end">{_text(x.label)}</text>',
        *(_effect(each, across, _TOP + _ROW_HEIGHT * (row + 0.5)) for row, each in enumerate(effects)),
    ]
    told = "; ".join(f"{each.name} {each.said}" for each in effects)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {bottom + 40}" '
        f'role="img" aria-label="{_text(title, 200)}: {_text(told, 1200)}">{"".join(parts)}</svg>'
    )


def _reach(effects: Sequence[Effect], margin: float) -> float:
    """How far the axis goes to both sides of zero: over all of few effects, and over most of many."""
    ends = [abs(end) for each in effects for end in (each.low, each.high, each.value) if math.isfinite(end)]
    if not ends:
        return 0.0
    usual = sorted(ends)[3 * len(ends) // 4]
    far = max(ends) if len(effects) < _FEW_EFFECTS else min(max(ends), _FAR * usual)
    return 1.05 * max(far, margin) or 1.0


def _band(across: _Scale, margin: float, bottom: float) -> str:
    start, end = across.place(-margin), across.place(margin)
    return (
        f'<rect class="band" x="{start:.1f}" y="{_TOP}" width="{end - start:.1f}" height="{bottom - _TOP}">'
        f"<title>margin {margin:g}</title></rect>"
    )


def _forest_tick(across: _Scale, value: float, bottom: float) -> str:
    at, said = across.place(value), _tick(value, across.step, "number")
    line = "axis" if abs(value) < across.step / 2 else "grid"
    return "".join(
        (
            f'<path class="{line}" d="M{at:.1f} {_TOP}V{bottom}"/>',
            *(f'<text x="{at:.1f}" y="{y}" text-anchor="middle">{said}</text>' for y in (_TOP - 8, bottom + 16)),
        )
    )


def _effect(each: Effect, across: _Scale, y: float) -> str:
    """The name, the interval with a mark, and what is said."""
    shown = _text(each.name, _LONGEST_NAME)
    name = f'<text class="name" x="{_NAMES - 14}" y="{y + 4:.0f}" text-anchor="end">{shown}</text>'
    said = f'<text x="{across.end + 14}" y="{y + 4:.0f}">{_text(each.said)}</text>'
    if not math.isfinite(each.value):
        return name + said
    low, high = (min(max(end, across.low), across.high) for end in (each.low, each.high))
    inside = across.low <= each.value <= across.high
    ends = _end(each.low, across, low, y, -1) + _end(each.high, across, high, y, 1)
    line = f"M{across.place(low):.1f} {y}H{across.place(high):.1f}{ends}"
    if not inside:
        edge, side = (across.high, 1) if each.value > 0 else (across.low, -1)
        line = f"M{across.place(edge) - 30 * side:.1f} {y}h{30 * side}{_end(each.value, across, edge, y, side)}"
    mark = _mark(each.mark, across.place(each.value), y) if inside else ""
    whole = f"<title>{_text(each.name)}: {_text(each.said)}</title>"
    return f'{name}<g>{whole}<path class="r{each.mark} range" d="{line}"/>{mark}</g>{said}'


def _mark(number: int, at: float, y: float) -> str:
    return (
        f'<circle class="r0" cx="{at:.1f}" cy="{y}" r="4"/>',
        f'<rect class="r1" x="{at - 4:.1f}" y="{y - 4}" width="8" height="8"/>',
        f'<path class="r2" d="M{at:.1f} {y - 5}l5 5l-5 5l-5 -5z"/>',
        f'<circle class="r3 open" cx="{at:.1f}" cy="{y}" r="4"/>',
    )[number]


def _end(value: float, across: _Scale, drawn: float, y: float, side: int) -> str:
    """A stroke across the end of an interval, or an arrow where the axis does not show it."""
    at = across.place(drawn)
    if value == drawn:
        return f"M{at:.1f} {y - 4}v8"
    return f"M{at - 6 * side:.1f} {y - 4}l{6 * side} 4l{-6 * side} 4"


def standalone(svg: str) -> str:
    """A chart with its style sheet, for a file of its own."""
    opened = svg.index(">") + 1
    return f"{svg[:opened]}<style>{CHART_STYLE}</style>{svg[opened:]}"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Places values between ``low`` and ``high`` from the coordinate ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    step: float

    @classmethod
    def over(cls, values: Sequence[float], axis: Axis, start: float, end: float, *, room: bool) -> _Scale:
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if axis.low is None and (axis.from_zero or (room and 0 < low < 0.25 * high)):
            low = min(low, 0.0)
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):
            pad = abs(low) * 0.05 or 1.0
            low, high = (low - pad, high + pad) if room else (low, low + pad)
        elif room:
            pad = (high - low) * 0.06
            low = low if axis.low is not None or low == 0.0 else low - pad
            high = high if axis.high is not None else high + pad
        wanted = (high - low) * (64 if not room else 38) / abs(end - start)
        return cls(low, high, start, end, _nice(wanted) if axis.kind == "number" else _nice_seconds(wanted))

    def place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(max(share, -0.01), 1.01)

    def ticks(self, kind: Kind) -> Iterator[float]:
        shift = -time.localtime(self.low).tm_gmtoff if kind == "clock" else 0
        first = math.ceil((self.low - shift) / self.step - 1e-9)
        last = math.floor((self.high - shift) / self.step + 1e-9)
        for index in range(first, min(last, first + 50) + 1):
            yield shift + index * self.step


def _nice(least: float) -> float:
    """The smallest of 1, 2, 5, 10 … that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((n * power for n in (1, 2, 5) if n * power >= least * (1 - 1e-9)), 10 * power)


def _nice_seconds(least: float) -> float:
    if least < 1:
        return _nice(least)
    return next((float(s) for s in _SECONDS if s >= least), _DAY * max(1.0, _nice(least / _DAY)))


def format_number(value: float, step: float) -> str:
    """``value`` with the digits that tell it from its neighbours ``step`` away: 0.25, 1.5k, 2M."""
    if value and step < 1e-4:
        return f"{value:.3g}"
    for factor, suffix in _SUFFIXES:
        if abs(value) >= factor and step >= factor / 1000:
            return f"{value / factor:.{_decimals(step / factor)}f}{suffix}"
    return f"{value:.{_decimals(step)}f}"


def _decimals(step: float) -> int:
    for decimals in range(5):
        if abs(step * 10**decimals - round(step * 10**decimals)) < 1e-6 * step * 10**decimals:
            return decimals
    return 5


def _tick(value: float, step: float, kind: Kind) -> str:
    if kind == "number":
        return format_number(value, step)
    if kind == "clock":
        form = "%m-%d" if step >= _DAY else "%H:%M" if step >= 60 else "%H:%M:%S"
        return time.strftime(form, time.localtime(value))
    for seconds, unit in ((_DAY, "d"), (3600, "h"), (60, "min")):
        if value >= seconds and step >= seconds / 4:
            return f"{value / seconds:g} {unit}"
    return f"{value:g} s"


def _axes(x: Axis, y: Axis, across: _Scale, up: _Scale, width: int, height: int) -> Iterator[str]:
    bottom, right = height - _BOTTOM, width - _RIGHT
    for value in up.ticks(y.kind):
        level = f"{up.place(value):.1f}"
        yield f'<path class="grid" d="M{_LEFT} {level}H{right}"/>'
        yield f'<text x="{_LEFT - 6}" y="{level}" dy=".35em" text-anchor="end">{_tick(value, up.step, y.kind)}</text>'
    for value in across.ticks(x.kind):
        at, said = across.place(value), _tick(value, across.step, x.kind)
        yield f'<path class="axis" d="M{at:.1f} {bottom}v4"/>'
        anchor = "end" if at > right - 12 else "middle"
        yield f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{said}</text>'
    yield f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>'
    yield f'<text x="{_LEFT}" y="14">{_text(y.label)}</text>'
    yield f'<text x="{right}" y="{height - 4}" text-anchor="end">{_text(x.label)}</text>'


def style(number: int) -> tuple[int, str]:
    """Colour and dash of the line ``number``: different pairs for the first ``MAX_STYLES``, no dash for the first."""
    color = number % len(_COLORS)
    return color, _DASHES[(number + number // len(_COLORS)) % len(_DASHES)]


def _stroke(number: int, strong: bool) -> str:
    color, dash = style(number)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'class="line s{color}{" strong" * strong}"{dashed}'


def _line(number: int, each: Series, pieces: Sequence[Sequence[Point]], across: _Scale, up: _Scale) -> str:
    """The path of a series; a point between two gaps is a dot."""
    paths, dots, color = [], [], style(number)[0]
    for piece in pieces:
        placed = [(across.place(px), up.place(py)) for px, py in piece]
        if len(placed) == 1:
            dots.append('<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="2"/>'.format(color, *placed[0]))
        else:
            paths.append("M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in _thinned(placed)))
    named = f"<title>{_text(each.name)}</title>"
    line = f'<path {_stroke(number, each.strong)} d="{"".join(paths)}">{named}</path>' if paths else ""
    return line + "".join(dots)


def _limit(limit: Limit, up: _Scale, width: int) -> str:
    """A line over the whole width with its name above its right end."""
    level, right = up.place(limit.value), width - _RIGHT
    return (
        f'<path class="limit" d="M{_LEFT} {level:.1f}H{right}"><title>{_text(limit.name)}</title></path>'
        f'<text class="limit" x="{right}" y="{level - 4:.1f}" text-anchor="end">{_text(limit.name)}</text>'
    )


def _pieces(points: Iterable[Point], across: Kind, up: Kind) -> Iterator[list[Point]]:
    """The points between two gaps. A value that no axis can show is a gap."""
    piece: list[Point] = []
    for point in points:
        if abs(point[0]) < _LIMITS[across] and abs(point[1]) < _LIMITS[up]:
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _thinned(placed: Sequence[Point]) -> Iterator[Point]:
    """At most four points of each column of pixels: the first, lowest, highest and last."""
    begin = 0
    for end in range(1, len(placed) + 1):
        if end < len(placed) and int(placed[end][0]) == int(placed[begin][0]):
            continue
        column = range(begin, end)
        low, high = min(column, key=lambda i: placed[i][1]), max(column, key=lambda i: placed[i][1])
        yield from (placed[i] for i in sorted({begin, low, high, end - 1}))
        begin = end


def _span(span: Span, across: _Scale, height: int) -> str:
    start, end = across.place(max(span.start, across.low)), across.place(min(span.end, across.high))
    wide = max(end - start, 2.0)
    return (
        f'<rect class="span {span.tone}" x="{start:.1f}" y="{_TOP}" width="{wide:.1f}" '
        f'height="{height - _BOTTOM - _TOP}"><title>{_text(span.label, 200)}</title></rect>'
    )


def _legend(series: Sequence[Series], width: int, height: int) -> tuple[list[str], int]:
    """The names of all lines below the chart, and in how many rows; none for a single line."""
    if len(series) < 2:
        return [], 0
    parts, at, row = [], float(_LEFT), 0
    for number, each in enumerate(series):
        wide = 36 + _CHARACTER * min(len(each.name), _MAX_TEXT)
        if at > _LEFT and at + wide > width:
            at, row = float(_LEFT), row + 1
        y = height + 10 + row * _LEGEND_ROW
        weight = ' font-weight="bold"' if each.strong else ""
        parts.append(f'<path {_stroke(number, each.strong)} d="M{at:.0f} {y - 4}h22"/>')
        parts.append(f'<text x="{at + 27:.0f}" y="{y}"{weight}>{_text(each.name)}</text>')
        at += wide
    return parts, row + 1


def _told(name: str, points: Sequence[Point], y: Axis) -> str:
    low, high = min(p[1] for p in points), max(p[1] for p in points)
    return f"{name} from {low:.4g} to {high:.4g}, last {points[-1][1]:.4g} {y.label}".rstrip()


def _text(text: str, most: int = _MAX_TEXT) -> str:
    plain = "".join(c if c.isprintable() else " " for c in text)
    shown = plain if len(plain) <= most else plain[: most - 1] + "…"
    return shown.encode("utf-8", "replace").decode().translate(_ESCAPES)
