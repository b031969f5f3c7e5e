"""Exemplars of OpenMetrics: each leads from a series of a counter to the incident that it counts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from opsd.agent.loop import Snapshot
from opsd.agent.metrics import COST, OPENED
from opsd.agent.web.api import newest_first
from opsd.collectors.lib.kernel.xid import COUNTED, TOTAL
from opsd.runbooks.base import Incident

LABEL: Final = "incident_id"
_XID: Final = re.compile(r"\bXid (\d+)")


class Exemplar(NamedTuple):
    """The incident with this id, opened at ``at`` (epoch seconds)."""

    incident: str
    at: float


Exemplars = Mapping[str, Mapping[tuple[str, ...], Exemplar]]
"""By the name of the metric and the label values of the series."""


def exemplars(snapshot: Snapshot) -> Exemplars:
    """The newest incident of each series."""
    found: dict[str, dict[tuple[str, ...], Exemplar]] = {}
    for incident in newest_first(snapshot):
        for metric, labels in _series(incident):
            found.setdefault(metric, {}).setdefault(labels, Exemplar(incident.id, round(incident.opened_at, 3)))
    return found


def _series(incident: Incident) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield OPENED.name, (incident.kind,)
    if incident.cost.gpu_seconds > 0:
        yield COST.name, (incident.kind,)
    if isinstance(pci := incident.data.get("pci"), str):
        for code in _XID.findall(" ".join((incident.summary, *(evidence.text for evidence in incident.evidence)))):
            yield TOTAL.name, (pci, code if int(code) in COUNTED else "other")
