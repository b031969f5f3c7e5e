"""Figures from outages of nodes: Slurm's events, journals of agents, or a trace of faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from opsd.calibration.evidence import Evidence, NotUsable, TooLittle
from opsd.calibration.runs import LEAST_EVENTS
from opsd.simulate import history
from opsd.simulate.faults import DAY_S, FaultsError


def figures_of(path: Path, at: float) -> Iterator[Evidence]:
    """How often nodes go, and how long they stay away; the history ended ``at``. Raises NotUsable."""
    try:
        trace = history.load(path, None)
    except history.EmptyHistoryError as error:
        raise TooLittle(str(error)) from error
    except FaultsError as error:
        raise NotUsable(str(error)) from error
    repairs = trace.repairs
    days = len(trace.nodes) * trace.span_s / DAY_S
    if len(repairs) < LEAST_EVENTS:
        few = "outage" if len(repairs) == 1 else "outages"
        raise TooLittle(f"{path} has {len(repairs)} {few} in {days:,.0f} node days, too few for a rate: gather more")
    told = f"{len(repairs)} outages in {days:,.0f} node days"
    yield Evidence("outages", len(repairs) / days, told, path, at)
    ended = [took for took, over in repairs if over]
    if len(ended) >= LEAST_EVENTS:
        yield Evidence("repair", fmean(ended), f"mean of {len(ended)} repairs that have ended", path, at)
