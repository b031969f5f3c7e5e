"""All recording rules and alerts, and the guides of those alerts that no agent can raise as an incident.

Prometheus raises these from series of many nodes, or because a series is missing. Like those of runbooks their guides
are shown by ``opsd runbook show NAME`` and at ``/runbooks/NAME`` of any agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opsd.dashboards.alerts.agent import AGENT
from opsd.dashboards.alerts.availability import AVAILABILITY
from opsd.dashboards.alerts.goodput import GOODPUT
from opsd.dashboards.alerts.hardware import HARDWARE, NETWORK
from opsd.dashboards.alerts.model import Alert, Group, RecordingRule, incident
from opsd.dashboards.alerts.sources import SOURCES
from opsd.dashboards.alerts.storage import STORAGE
from opsd.dashboards.alerts.training import CHECKPOINTS, DATA, EVALUATIONS, TRAINING
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Guide, Runbook

RECORDINGS = Group(
    "recordings",
    (
        RecordingRule("run:opsd_rank_tokens:rate5m", "sum by (cluster, run) (rate(opsd_rank_tokens_total[5m]))"),
        RecordingRule("run:opsd_rank_tokens:usual6h", "quantile_over_time(0.5, run:opsd_rank_tokens:rate5m[6h])"),
        RecordingRule(
            "run_phase:opsd_rank_phase_seconds:ratio_rate5m",
            """
sum by (cluster, run, phase) (rate(opsd_rank_phase_seconds_total[5m]))
  / on (cluster, run) group_left ()
sum by (cluster, run) (rate(opsd_rank_phase_seconds_total[5m]))
""",
        ),
        RecordingRule("cluster:opsd_gpu_up:sum", "sum by (cluster) (opsd_gpu_up)"),
        RecordingRule("cluster:opsd_gpu_job_info:count", "count by (cluster) (opsd_gpu_job_info)"),
    ),
)


_BY_AREA = (
    RECORDINGS, AVAILABILITY, HARDWARE, NETWORK, STORAGE, GOODPUT, TRAINING, DATA, CHECKPOINTS, EVALUATIONS,
    Group("itself", AGENT + SOURCES),
)  # fmt: skip


def _of_runbook(book: Runbook) -> Alert:
    """The alert of a runbook for which none was written, with the text of its guide."""
    meaning = " ".join(book.guide.meaning.split())
    return Alert(
        "".join(word.title() for word in book.kind.split("_")),
        incident(book.kind),
        summary=f"{book.guide.title} ({{{{ $labels.instance }}}})",
        description=meaning.partition(". ")[0].rstrip(".") + ".",
    )


def _remaining() -> Group:
    """An alert for every kind of incident that has none in another group."""
    written = {rule.runbook for group in _BY_AREA for rule in group.rules if isinstance(rule, Alert)}
    return Group("remaining", [_of_runbook(book) for book in RUNBOOKS if book.kind not in written])


GROUPS = tuple(group for group in (*_BY_AREA, _remaining()) if group.rules)


def alerts() -> list[Alert]:
    """Every alert, in the order of the groups."""
    return [rule for group in GROUPS for rule in group.rules if isinstance(rule, Alert)]


GUIDES: Final[Mapping[str, Guide]] = {alert.runbook: alert.guide for alert in alerts() if alert.guide is not None}
"""Guides of alerts without a runbook, by the alert's name in snake case."""
