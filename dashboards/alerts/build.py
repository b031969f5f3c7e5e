"""Build the rules. Prometheus loads the YAML under deploy/prometheus/rules; a test checks that it is current."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from opsd.dashboards.alerts.goodput import GOODPUT
from opsd.dashboards.alerts.hardware import AVAILABILITY, HARDWARE, NETWORK, STORAGE
from opsd.dashboards.alerts.itself import ITSELF
from opsd.dashboards.alerts.model import Alert, Group, RecordingRule, Scheme, incident
from opsd.dashboards.alerts.training import CHECKPOINTS, DATA, EVALUATIONS, TRAINING
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Runbook

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
    RECORDINGS, AVAILABILITY, HARDWARE, NETWORK, STORAGE, GOODPUT, TRAINING, DATA, CHECKPOINTS, EVALUATIONS, ITSELF,
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
    written = {rule.guide for group in _BY_AREA for rule in group.rules if isinstance(rule, Alert)}
    return Group("remaining", [_of_runbook(book) for book in RUNBOOKS if book.kind not in written])


GROUPS = tuple(group for group in (*_BY_AREA, _remaining()) if group.rules)
FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"


def alerts() -> list[Alert]:
    """Every alert, in the order of the groups."""
    return [rule for group in GROUPS for rule in group.rules if isinstance(rule, Alert)]


def rendered(folder: Path = FOLDER, scheme: Scheme = "http") -> dict[Path, str]:
    """File and content of every group; ``scheme`` is that of the links to agents."""
    return {folder / f"{group.name}.yml": _speaking(group, scheme).to_yaml() for group in GROUPS}


def _speaking(group: Group, scheme: Scheme) -> Group:
    rules = [replace(rule, scheme=scheme) if isinstance(rule, Alert) else rule for rule in group.rules]
    return replace(group, rules=rules)
