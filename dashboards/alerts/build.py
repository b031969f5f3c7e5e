"""Build the rules. Prometheus loads the YAML under deploy/prometheus/rules; a test checks that it is current."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from opsd.dashboards.alerts.catalogue import GROUPS
from opsd.dashboards.alerts.model import Alert, Group, Scheme

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"
HEADER = "# Made by `opsd alerts build` from dashboards/alerts; a change made here is lost.\n"


def rendered(folder: Path = FOLDER, scheme: Scheme = "http", site: str = "") -> dict[Path, str]:
    """File and content of every group. Links go to the guides on ``site``, or on agents by ``scheme``."""
    return {folder / f"{group.name}.yml": _yaml(group, scheme, site) for group in GROUPS}


def _yaml(group: Group, scheme: Scheme, site: str) -> str:
    rules = [replace(rule, scheme=scheme, site=site) if isinstance(rule, Alert) else rule for rule in group.rules]
    content = {"name": f"opsd-{group.name}", "interval": group.interval, "rules": [rule.as_rule() for rule in rules]}
    return HEADER + yaml.dump({"groups": [content]}, Dumper=_Dumper, sort_keys=False, width=116, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line texts as blocks, and indents lists."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
