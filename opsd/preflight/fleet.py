"""Comparing nodes: which differ from the majority, and the medians to compare one node with."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from pydantic import TypeAdapter, ValidationError

from opsd.preflight.checks import gpu_inventory
from opsd.preflight.report import Report

_OF_ONE_NODE: Final = re.compile(rf"GPU \d+|{gpu_inventory.DOMAIN}")


class FleetError(Exception):
    """The fleet file cannot be used; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The medians of ``nodes`` nodes, by "check/measure", over all their subjects."""

    nodes: int
    median_of: Mapping[str, float]

    def medians(self, check: str) -> Mapping[str, float]:
        """The medians of one check by measure."""
        prefix = f"{check}/"
        return {key.removeprefix(prefix): value for key, value in self.median_of.items() if key.startswith(prefix)}

    def to_json(self) -> str:
        """The fleet as JSON text."""
        return _ADAPTER.dump_json(self, indent=1).decode() + "\n"

    @classmethod
    def read(cls, path: Path) -> Fleet:
        """The fleet in the file ``path``. Raises FleetError."""
        try:
            return _ADAPTER.validate_json(path.read_bytes())
        except OSError as error:
            raise FleetError(f"{path} cannot be read: {error.strerror}; `opsd preflight merge` writes one") from error
        except ValidationError as error:
            raise FleetError(
                f"{path} is no fleet file; `opsd preflight merge --fleet {path} REPORT…` writes one"
            ) from error


_ADAPTER = TypeAdapter(Fleet)


@dataclass(frozen=True, slots=True)
class Deviation:
    """``nodes`` have ``value`` where ``majority_count`` of ``total`` have ``majority``."""

    fact: str
    value: str
    nodes: tuple[str, ...]
    majority: str
    majority_count: int
    total: int

    def __str__(self) -> str:
        who = ", ".join(self.nodes[:8]) + (f" and {len(self.nodes) - 8} more" if len(self.nodes) > 8 else "")
        return f"{self.fact} is {self.value} on {who}; {self.majority_count} of {self.total} nodes have {self.majority}"


def fleet_of(reports: Sequence[Report]) -> Fleet:
    """Medians over the newest report of every node."""
    values: dict[str, list[float]] = defaultdict(list)
    newest = newest_by_node(reports)
    for report in newest.values():
        for result in report.results:
            for value in result.values:
                if value.better:
                    values[f"{result.check}/{value.measure}"].append(value.value)
    return Fleet(len(newest), {key: median(found) for key, found in sorted(values.items())})


def newest_by_node(reports: Sequence[Report]) -> dict[str, Report]:
    """The newest report of every node, by node."""
    return {report.node: report for report in sorted(reports, key=lambda report: report.started)}


def deviations(facts: Mapping[str, Mapping[str, str]]) -> list[Deviation]:
    """Facts (by node, then by name) in which nodes differ from the majority; a missing fact is "absent".

    On a tie the value that sorts first counts as the majority, so that the result does not depend on the order.
    """
    found = []
    for fact in sorted({name for of_node in facts.values() for name in of_node}):
        values = {node: of_node.get(fact, "absent") for node, of_node in facts.items()}
        counts = Counter(values.values())
        majority, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
        for value in sorted(counts.keys() - {majority}):
            nodes = tuple(sorted(node for node, theirs in values.items() if theirs == value))
            found.append(Deviation(fact, value, nodes, majority, count, len(facts)))
    return found


def facts_of(reports: Sequence[Report]) -> dict[str, Mapping[str, str]]:
    """Versions and GPU layout of every node, by node; what differs by nature, like UUIDs and domains, is left out."""
    found = {
        node: {
            name: value
            for result in report.results
            if result.check in ("versions", "gpu_inventory")
            for name, value in result.facts.items()
            if not _OF_ONE_NODE.fullmatch(name)
        }
        for node, report in newest_by_node(reports).items()
    }
    return {node: facts for node, facts in found.items() if facts}
