"""What rules are made of, and how they become Prometheus' YAML.

An alert is named like its runbook: ``GpuThrottle`` is explained on the page ``gpu_throttle``. Its scope says what it
is about, and with that which labels it has and how its message finds the job and what the job loses. The message is
the same for all: node, GPU, job, cost, next step. Jobs are looked up when the message is written and are no labels, so
that an alert stays the same alert when the next job starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

Scope = Literal["gpu", "node", "run", "cluster"]
Severity = Literal["critical", "warning", "info"]
Scheme = Literal["http", "https"]

HEADER = "# Made by `opsd alerts build` from dashboards/alerts; a change made here is lost.\n"

_NODE = '{{ reReplaceAll ":[0-9]+$" "" $labels.instance }}'
_MATCHERS: Mapping[Scope, tuple[str, str]] = {
    "gpu": ("{instance=%q, gpu=%q}", " $labels.instance $labels.gpu"),
    "node": ("{instance=%q}", " $labels.instance"),
    "run": ("{cluster=%q, run=%q}", " $labels.cluster $labels.run"),
}
_ANY_AGENT = (
    '{{ with query "up{job=\\"opsd\\"} == 1" }}{{ . | first | label "instance" }}{{ else }}localhost:9477{{ end }}'
)
"""Host and port of an agent that lives: every agent has every page. Without any, that of the reader's own machine."""
_REMEMBERED = "15m"
"""How long after its last scrape the jobs of a silent agent are still named."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. ``severity`` None takes it from the label ``severity`` of the expression's result.

    ``hold`` is Prometheus' ``for``, ``keep`` its ``keep_firing_for``. ``cost`` overrides what the message says of it.
    ``agent_lives`` is whether the page can be had from the agent that the alert is about. ``window`` becomes a label,
    which tells rules of one name apart. ``scheme`` is what the agents speak.
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

    @property
    def guide(self) -> str:
        """Name of the runbook page: the alert's name in snake case."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()

    def as_rule(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        rule: dict[str, Any] = {"alert": self.name, "expr": self.expr.strip(), "for": self.hold}
        if self.keep:
            rule["keep_firing_for"] = self.keep
        if self.severity:
            rule["labels"] = {"severity": self.severity, **({"window": self.window} if self.window else {})}
        return {**rule, "annotations": self._annotations()}

    def _annotations(self) -> dict[str, str]:
        here = self.scope in ("gpu", "node")
        agent = "{{ $labels.instance }}" if here and self.agent_lives else _ANY_AGENT
        where = {"node": _NODE, **({"gpu": "{{ $labels.gpu }}"} if self.scope == "gpu" else {})} if here else {}
        ask = f"on {_NODE}: opsd incidents; " if here and self.agent_lives else ""
        return {
            "summary": self.summary,
            "description": self.description,
            **where,
            **self._job_and_cost(),
            "next_step": f"{ask}opsd runbook show {self.guide}",
            "runbook_url": f"{self.scheme}://{agent}/runbooks/{self.guide}",
        }

    def _job_and_cost(self) -> dict[str, str]:
        """Which jobs are hit, and how many GPUs belong to them."""
        if self.scope == "cluster":
            return {"cost": self.cost} if self.cost else {}
        matcher, arguments = _MATCHERS[self.scope]
        every, hit = "opsd_gpu_job_info", f"opsd_gpu_job_info{matcher}"
        if not self.agent_lives:
            every, hit = (f"last_over_time({series}[{_REMEMBERED}])" for series in (every, hit))
        jobs = f"count by (job_id) ({every} and on (job_id) {hit})"
        found = f'{{{{ range $i, $job := query (printf "{jobs}"{arguments}) }}}}{{{{ if $i }}}}, {{{{ end }}}}'
        held = (
            "{{ $job.Value }} GPUs of job {{ $job.Labels.job_id }} wait or go at this pace: "
            "up to {{ $job.Value }} GPU-hours an hour"
        )
        return {
            "job": f"{found}{{{{ $job.Labels.job_id }}}}{{{{ else }}}}none{{{{ end }}}}",
            "cost": self.cost or f"{found}{held}{{{{ else }}}}no job is known to be hit{{{{ end }}}}",
        }


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

    def to_yaml(self) -> str:
        """The file of this group."""
        group = {"name": f"opsd-{self.name}", "interval": self.interval, "rules": [r.as_rule() for r in self.rules]}
        return HEADER + yaml.dump({"groups": [group]}, Dumper=_Dumper, sort_keys=False, width=116, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and lists indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def incident(kind: str) -> str:
    """Agents that have an incident of ``kind``, by its severity: what only the agent's own past and logs can tell."""
    return f'sum by (cluster, instance, severity) (opsd_incidents{{kind="{kind}"}}) > 0'
