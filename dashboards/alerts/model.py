"""Alerts and recording rules, and how they become Prometheus' YAML.

An alert is named like its runbook: ``GpuThrottle`` is explained by ``gpu_throttle``. Its scope decides which labels it
has and how its message finds the affected job and the cost. All messages have the same fields: node, GPU, job, cost,
next step. The job is looked up when the message is rendered and is not a label, so that an alert stays the same alert
when the next job starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opsd.runbooks.base import Guide

Scope = Literal["gpu", "node", "run", "cluster"]
Severity = Literal["critical", "warning", "info"]
Scheme = Literal["http", "https"]

_NODE = '{{ reReplaceAll ":[0-9]+$" "" $labels.instance }}'
_MATCHERS: Mapping[Scope, tuple[str, str]] = {
    "gpu": ("{instance=%q, gpu=%q}", " $labels.instance $labels.gpu"),
    "node": ("{instance=%q}", " $labels.instance"),
    "run": ("{cluster=%q, run=%q}", " $labels.cluster $labels.run"),
}
_LIVE = 'topk(1, up{job=\\"opsd\\", instance!=%q} == 1 or (up{job=\\"opsd\\"} == 1) / 2)'
_ANY_AGENT = (
    f'{{{{ with query (printf "{_LIVE}" $labels.instance) }}}}'
    '{{ . | first | label "instance" }}{{ else }}localhost:9477{{ end }}'
)
"""Host and port of a live agent: every agent serves every guide, and another node's still does when this one is off.

That of the alert's own node is taken if it is the only one; without any, localhost.
"""
LOST = "opsd_incidents_gpu_seconds_total"
_RECENT = "2m"
"""Over which the loss of an incident is averaged."""
_REMEMBERED = "15m"
"""How long after its last scrape the jobs of a silent agent are still looked up."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. With ``severity`` None it comes from the label ``severity`` of the expression's result.

    ``hold`` is Prometheus' ``for``, ``keep`` its ``keep_firing_for``. ``cost`` replaces the computed text.
    ``agent_lives`` says whether the node that the alert is about can be asked. ``window`` becomes a label, which
    distinguishes rules of one name. ``scheme`` is that of the links to agents; ``site`` has the guides if it is given.
    ``guide`` is for alerts that are about no incident; for the others it is that of the runbook.
    """

    name: str
    expr: str
    summary: str
    description: str
    scope: Scope = "node"
    severity: Severity | None = None
    hold: str = "0s"
    keep: str = ""
    cost: str = ""
    agent_lives: bool = True
    window: str = ""
    scheme: Scheme = "http"
    site: str = ""
    guide: Guide | None = None

    @property
    def runbook(self) -> str:
        """Name of the runbook: the alert's name in snake case."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()

    def as_rule(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        rule: dict[str, Any] = {"alert": self.name, "expr": self.expr.strip(), "for": self.hold}
        if self.keep:
            rule["keep_firing_for"] = self.keep
        if self.severity:
            rule["labels"] = {"severity": self.severity, **({"window": self.window} if self.window else {})}
        elif self.scope == "cluster":
            # promtool takes two rules of one name for one unless their labels differ.
            rule["labels"] = {"severity": "{{ $labels.severity }}"}
        return {**rule, "annotations": self._annotations()}

    def _annotations(self) -> dict[str, str]:
        here = self.scope in ("gpu", "node")
        where = {"node": _NODE, **({"gpu": "{{ $labels.gpu }}"} if self.scope == "gpu" else {})} if here else {}
        ask = f"on {_NODE}: opsd incidents; " if here and self.agent_lives else ""
        return {
            "summary": self.summary,
            "description": self.description,
            **where,
            **self._job_and_cost(),
            "next_step": f"{ask}opsd runbook show {self.runbook}",
            "runbook_url": f"{self.site.rstrip('/') or f'{self.scheme}://{_ANY_AGENT}/runbooks'}/{self.runbook}",
        }

    def _job_and_cost(self) -> dict[str, str]:
        """Which jobs are affected, and how many GPUs they have."""
        if self.scope == "cluster":
            return {"cost": self.cost} if self.cost else {}
        matcher, arguments = _MATCHERS[self.scope]
        every, hit = "opsd_gpu_job_info", f"opsd_gpu_job_info{matcher}"
        if not self.agent_lives:
            every, hit = (f"last_over_time({series}[{_REMEMBERED}])" for series in (every, hit))
        jobs = f"count by (job_id) ({every} and on (job_id) {hit})"
        found = f'{{{{ range $i, $job := query (printf "{jobs}"{arguments}) }}}}{{{{ if $i }}}}, {{{{ end }}}}'
        held = "{{ $job.Value }} GPUs of job {{ $job.Labels.job_id }} are affected"
        return {
            "job": f"{found}{{{{ $job.Labels.job_id }}}}{{{{ else }}}}none{{{{ end }}}}",
            "cost": self.cost
            or f"{found}{held}{{{{ else }}}}no job is known to be affected{{{{ end }}}}{self._lost()}",
        }

    def _lost(self) -> str:
        """What the agent counts as lost by such incidents of the node, as their pages have it; empty if nothing."""
        if self.guide is not None or self.scope == "run":
            return ""
        lost = f'sum(rate({LOST}{{kind=\\"{self.runbook}\\", instance=%q}}[{_RECENT}])) > 0'
        counted = '; this kind of incident costs the node {{ . | first | value | printf "%.1f" }} GPU-hours per hour'
        return f'{{{{ with query (printf "{lost}" $labels.instance) }}}}{counted}{{{{ end }}}}'


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """One recorded series, named ``level:metric:operations``."""

    name: str
    expr: str

    def as_rule(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {"record": self.name, "expr": self.expr.strip()}


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together every ``interval``."""

    name: str
    rules: Sequence[Alert | RecordingRule]
    interval: str = "15s"


def incident(kind: str, *matchers: str) -> str:
    """Agents with an incident of ``kind``, by its severity and GPU; not one that somebody has, or that has a cause.

    ``matchers`` narrow them down by further labels.
    """
    mine = ", ".join((f'opsd_incidents{{kind="{kind}"', *matchers, 'state!~"acknowledged|symptom"}'))
    return f"sum by (cluster, instance, gpu, severity) ({mine}) > 0"


def manual(markdown: str) -> Guide:
    """A guide without its last section, for an alert about which opsd does nothing."""
    nothing = (
        "\n## What opsd does by itself\nNothing, in every mode: observe, recommend and act. A person has to act.\n"
    )
    return Guide.parse(markdown + nothing)
