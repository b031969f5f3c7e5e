"""Prometheus' rules and the guides of their alerts, all written by hand.

The rules are in ``deploy/prometheus/rules``, the guides in ``docs/runbooks``.

An alert is named like its guide: ``GpuThrottle`` is explained by ``gpu_throttle``. Its messages say node, GPU, job,
cost and next step. Those about incidents also say who acts. All this is looked up when a message is rendered. The job
as a label would make another alert of the same fault once the next job starts.

``opsd runbook show NAME`` shows a guide, and any agent at ``/runbooks/NAME``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Scheme = Literal["http", "https"]

FOLDER: Final = Path(__file__).parents[1] / "deploy" / "prometheus" / "rules"
_LINK: Final = re.compile(r"runbook_url: http://(?P<agent>.*)/runbooks/")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule as its file has it: an alert, or a series that is recorded."""

    name: str
    expr: str
    alert: bool
    hold: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    @property
    def runbook(self) -> str:
        """Name of the alert's guide: its own in snake case."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()

    @property
    def severity(self) -> str | None:
        """None if it is that of the incident."""
        fixed = self.labels.get("severity", "")
        return None if not fixed or "{{" in fixed else fixed

    @property
    def shared(self) -> bool:
        """Whether it is about a cluster or a run, not about a node."""
        return "node" not in self.annotations


def rules(folder: Path = FOLDER) -> Iterator[Rule]:
    """Every rule of every file."""
    import yaml  # of the extra dashboards

    for file in sorted(folder.glob("*.yml")):
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            yield from map(_rule, group["rules"])


def alerts() -> list[Rule]:
    """Every alert."""
    return [rule for rule in rules() if rule.alert]


def linked(scheme: Scheme = "http", site: str = "", folder: Path = FOLDER) -> dict[str, str]:
    """Each file by its name, with links to the guides on ``site``, or on live agents by ``scheme``."""
    new = f"{site.rstrip('/')}/" if site else rf"{scheme}://\g<agent>/runbooks/"
    return {
        file.name: _LINK.sub(f"runbook_url: {new}", file.read_text(encoding="utf-8"))
        for file in sorted(folder.glob("*.yml"))
    }


def _rule(rule: Mapping[str, Any]) -> Rule:
    name = rule.get("alert") or rule["record"]
    labels, annotations = rule.get("labels", {}), rule.get("annotations", {})
    return Rule(name, rule["expr"], "alert" in rule, rule.get("for", "0s"), labels, annotations)
