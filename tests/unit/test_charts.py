"""Line charts: every input becomes an SVG that a browser can parse, with all lines inside the chart."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.charts import (
    MAX_STYLES,
    Axis,
    Effect,
    Kind,
    Limit,
    Series,
    Span,
    forest_plot,
    format_number,
    line_chart,
    standalone,
    style,
)  # fmt: skip

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
POINTS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=40).map(lambda points: sorted(points, key=lambda p: p[0]))
KINDS: tuple[Kind, ...] = ("number", "clock", "duration")


def draw(*points: tuple[float, float], y: Axis = Axis("nats"), spans: tuple[Span, ...] = ()) -> ElementTree.Element:  # noqa: B008
    return ElementTree.fromstring(line_chart("loss", [Series("a", points)], x=Axis("step"), y=y, spans=spans))


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter("{http://www.w3.org/2000/svg}text")]


@given(st.lists(st.tuples(st.text(max_size=20), POINTS), max_size=9), st.sampled_from(KINDS), st.sampled_from(KINDS))
def test_any_series_is_well_formed_and_inside(named: list[tuple[str, list]], across: Kind, up: Kind) -> None:
    """Whatever the numbers and names are, the SVG can be parsed and no point lies outside of it."""
    series = [Series(name, points) for name, points in named]
    svg = line_chart("t<&>", series, x=Axis("<x>", across), y=Axis("&", up), spans=[Span(0, math.inf, "'\"<")])
    seen = any(abs(x) < 1e11 and abs(y) < 1e11 for _, points in named for x, y in points)
    assert bool(svg) or not seen
    if not svg:
        return
    ElementTree.fromstring(standalone(svg))
    for path in re.findall(r'class="line s\d"[^>]* d="(M[^"]+)"', svg):
        for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path if "h" not in path else ""):
            assert 50 <= float(x) <= 715 and 20 <= float(y) <= 240


def test_a_gap_interrupts_the_line() -> None:
    """No line is drawn across a value that is missing; a point alone is a dot."""
    svg = draw((0, 1), (1, 2), (2, math.nan), (3, 4), (4, math.inf), (5, 1), (6, 2))
    line = next(e for e in svg.iter("{http://www.w3.org/2000/svg}path") if e.get("class", "").startswith("line"))
    assert (line.get("d") or "").count("M") == 2
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 1


def test_a_spike_survives_thinning() -> None:
    """One point among a hundred thousand is still drawn at its height."""
    points = [(float(n), 10.0 if n == 54_321 else 1.0) for n in range(100_000)]
    svg = line_chart("loss", [Series("a", points)], x=Axis("step"), y=Axis("nats"))
    heights = [float(y) for path in re.findall(r' d="(M[\d. L]+)"', svg) for y in re.findall(r" ([\d.]+)", path)]
    assert min(heights) < 60 < 150 < max(heights)
    assert len(svg) < 60_000


def test_axes_have_units_and_ticks() -> None:
    """The axis says its unit, and its ticks lie between the lowest and the highest value."""
    shown = texts(draw((0, 100_000), (1000, 400_000), y=Axis("tokens/s")))
    assert "tokens/s" in shown and "step" in shown and "200k" in shown and "500" in shown


def test_spans_outside_are_left_out() -> None:
    """A span of time is shaded where it meets the axis, and nowhere else."""
    svg = draw((0, 1), (10, 2), spans=(Span(2, 3, "gpu_lost"), Span(50, 60, "later")))
    rects = list(svg.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(rects) == 1 and rects[0][0].text == "gpu_lost"


def test_numbers_have_the_digits_that_their_neighbours_need() -> None:
    """Ticks are neither all alike nor longer than needed."""
    assert [format_number(v, s) for v, s in ((1500, 500), (2e6, 1e6), (0.25, 0.05), (3e-5, 1e-5), (0, 1))] == [
        "1.5k", "2M", "0.25", "3e-05", "0",
    ]  # fmt: skip


@given(st.integers(1, 16))
def test_all_gpus_of_a_node_can_be_told_apart(count: int) -> None:
    """Each line has its own pair of colour and dash, each is named, and the limit is none of them."""
    series = [Series(f"GPU {n}", [(0.0, n), (1.0, n + 1.0)], strong=n == count - 1) for n in range(count)]
    drawn = line_chart("Heat", series, x=Axis("s"), y=Axis("°C"), limits=[Limit("slows down", 87.0)], width=390)
    lines = re.findall(r'<path class="line (s\d+)( strong)?"( stroke-dasharray="[^"]+")? d="[^"]*"><title>', drawn)
    assert len({(color, dash) for color, _, dash in lines}) == len(lines) == count
    assert [bool(strong) for _, strong, _ in lines] == [False] * (count - 1) + [True]
    assert all(f">GPU {n}</text>" in drawn for n in range(count)) or count == 1
    assert drawn.count('<path class="limit"') == 1 and ">slows down</text>" in drawn
    assert len({style(n) for n in range(MAX_STYLES)}) == MAX_STYLES


@pytest.mark.parametrize("said", ["better -0.5 (no interval)", "undecided +4.48e-05 (-0.00115 to +0.00124)"])
def test_what_a_forest_plot_says_ends_within_it(said: str) -> None:
    """Long intervals had their end cut off."""
    drawn = forest_plot("Effects", [Effect("arm", 0.1, -0.1, 0.3, 3, said)], x=Axis("nats"))
    (begin,) = re.findall(rf'<text x="([\d.]+)"[^>]*>{re.escape(said)}', drawn)
    width = float(re.findall(r'viewBox="0 0 (\d+)', drawn)[0])
    assert float(begin) + 6.5 * len(said) <= width
