"""The result of a search for bad nodes, and the tests that led to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from opsd.preflight.grouptest import Level

Kind = Literal["node", "link", "path", "uplink", "switch", "group", "passing", "everything"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One test of the search: what it ``found``, None if it did not finish, and the value of a healthy group."""

    round: int
    purpose: str
    members: tuple[str, ...]
    passed: bool
    found: Level | None
    expected: Level | None


@dataclass(frozen=True, slots=True)
class Culprit:
    """A faulty part. ``parts`` are the node, the two nodes of a link, the switch or switches, or the nodes of a group.

    ``passing`` is a fault somewhere in a group that did not recur.
    """

    kind: Kind
    parts: tuple[str, ...]

    def __str__(self) -> str:
        match self.kind:
            case "node":
                return f"node {self.parts[0]}"
            case "link":
                return f"the link between {self.parts[0]} and {self.parts[1]}"
            case "path":
                return f"the path between switch {self.parts[0]} and switch {self.parts[1]}"
            case "uplink":
                return f"the uplink of switch {self.parts[0]}"
            case "switch":
                return f"switch {self.parts[0]}"
            case "group":
                return f"something that {', '.join(self.parts)} share: a switch, a power supply"
            case "passing":
                return f"something between {', '.join(self.parts)} that comes and goes"
        return "everything"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``suspected`` failed once and passed when tested again. The search used ``tests`` in ``rounds``."""

    culprits: tuple[Culprit, ...]
    suspected: tuple[str, ...]
    tests: int
    rounds: int
    evidence: tuple[Evidence, ...]

    @property
    def clean(self) -> bool:
        """Whether there is no culprit and no test failed, not even once."""
        return not self.culprits and not self.suspected and all(entry.passed for entry in self.evidence)
