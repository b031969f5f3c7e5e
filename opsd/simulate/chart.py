"""Studies as SVG: the ETTR over the number of spares, and what policies lose beside each other. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from opsd.charts import Axis, Series, line_chart, standalone
from opsd.simulate.account import Bucket
from opsd.simulate.study import Study

_LOST: Final[Mapping[str, Sequence[Bucket]]] = {
    "lost work": ("lost_work",), "restarts": ("detection", "restart", "queue"), "waiting": ("waiting",),
    "person": ("person",), "checkpoints": ("checkpoint",), "slower": ("fewer_nodes", "slow_nodes"),
}  # fmt: skip
_LEFT, _RIGHT, _TOP, _ROW, _WIDTH = 80, 190, 40, 34, 720
_BAR: Final = 16


def sweep_chart(studies: Sequence[Study]) -> str:
    """The ETTR over the number of spares."""
    values = ([study.ettr for study in studies], *zip(*(study.ettr_range for study in studies), strict=True))
    spares = [float(study.setup.spares) for study in studies]
    points = [[(x, 100 * y) for x, y in zip(spares, each, strict=True)] for each in values]
    series = [Series(name, each) for name, each in zip(("mean", "low", "high"), points, strict=True)]
    svg = line_chart("ETTR over spares", series, x=Axis("spares"), y=Axis("ETTR in percent"))
    return standalone(svg)


def compare_chart(studies: Sequence[Study]) -> str:
    """A bar for each policy: the share of the wall clock that it loses, by cause, with the interval of the mean."""
    most = max(1 - study.ettr_range[0] for study in studies) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _TOP + _ROW * len(studies) + 8
    rows = "".join(_row(study, _TOP + _ROW * at, scale) for at, study in enumerate(studies))
    told = "; ".join(f"{study.policy.name} {1 - study.ettr:.2%}" for study in studies)
    return standalone(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="Share of the wall clock lost: {told}">{"".join(_legend())}{rows}</svg>'
    )


def _legend() -> Iterator[str]:
    at = float(_LEFT)
    for number, name in enumerate(_LOST):
        yield f'<rect class="dot s{number}" x="{at:.0f}" y="8" width="10" height="10"/>'
        yield f'<text x="{at + 14:.0f}" y="17">{name}</text>'
        at += 28 + 7.2 * len(name)


def _row(study: Study, top: float, scale: float) -> str:
    parts, at = [f'<text x="{_LEFT - 8}" y="{top + 12}" text-anchor="end">{study.policy.name}</text>'], float(_LEFT)
    for number, buckets in enumerate(_LOST.values()):
        wide = sum(study.buckets[bucket] for bucket in buckets) / study.setup.seconds * scale
        parts.append(f'<rect class="dot s{number}" x="{at:.1f}" y="{top}" width="{wide:.1f}" height="{_BAR}"/>')
        at += wide
    low, high = (_LEFT + (1 - ettr) * scale for ettr in reversed(study.ettr_range))
    middle, (worst, best) = top + _BAR / 2, study.ettr_range
    parts.append(f'<path class="axis" fill="none" d="M{low:.1f} {middle - 4}v8m0 -4H{high:.1f}m0 -4v8"/>')
    text = f"ETTR {study.ettr:.2%} ({worst:.2%} to {best:.2%})"
    return "".join([*parts, f'<text x="{max(at, high) + 8:.0f}" y="{top + 12}">{text}</text>'])
