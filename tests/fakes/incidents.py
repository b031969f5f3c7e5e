"""Incidents, findings and repairs for tests, and how they go over time.

Incidents and findings for tests that do not care about their content.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from opsd.agent import lifecycle
from opsd.agent.incidents import IncidentTable, Transition, reduce
from opsd.agent.lifecycle import IncidentRules, Observed, Outcome
from opsd.collectors.base import RepairFact, RepairStep
from opsd.collectors.repairs import OUTCOMES, STEPS, Known
from opsd.runbooks.base import Cost, Culprit, Evidence, Finding, Incident, Severity, State

WALL = 1_700_000_000.0


def finding(kind: str = "trouble", key: str = "gpu0", **changes: object) -> Finding:
    """A finding about GPU 0."""
    base = Finding(
        key, Severity.WARNING, "GPU 0 is in trouble", Culprit("gpu", "node", 0), 0.8,
        (Evidence("too hot", "nvml", WALL),), Cost(0.1, 10.0, "a tenth"), "4242", {"gpu": 0}, kind=kind,
    )  # fmt: skip
    return replace(base, **changes)


def incident(id: str = "trouble-1", **changes: object) -> Incident:
    """An open incident with an action."""
    action = {
        "verb": "kill_process",
        "target": "r",
        "args": {"pid": 1},
        "reason": "",
        "at": WALL,
        "outcome": "ok",
        "detail": "",
    }
    base = Incident(
        id, "trouble", f"key of {id}", Severity.WARNING, State.OPEN, "GPU 0 is in trouble", Culprit("gpu", "node", 0),
        0.8, (Evidence("too hot", "nvml", WALL),), Cost(0.1, 10.0, "a tenth"), "4242", WALL, WALL + 5,
        actions=(action,), data={"gpu": 0},
    )  # fmt: skip
    return replace(base, **changes)


# What a node's agent knows of its repairs.


def known(state: str, tried: int, since: float | None = None) -> Known:
    """One repair in this state that has tried so many remedies."""
    steps = [RepairStep("reboot", 50.0, ok=True)] * tried
    steps += [RepairStep(state, 60.0)] * (state in STEPS)
    end = state if state in OUTCOMES else None
    return Known((RepairFact("repair-1", "n1", "gpu_xid", "Xid 95", 40.0, tuple(steps), end),), state, since)


# Incidents over time: ticks with findings, health and outcomes.


RULES = {"throttle": IncidentRules(open_after_s=0, clear_after_s=3, verify_s=10, max_attempts=2)}
T0 = 1_700_000_000.0


def throttled(key: str = "gpu0", **changes: object) -> Finding:
    base = Finding(
        key, Severity.WARNING, "GPU 0 is slow", Culprit("gpu", "node", 0), 0.8,
        (Evidence("too hot", "nvml", T0),), Cost(0.1, 10.0), kind="throttle",
    )  # fmt: skip
    return replace(base, **changes)


@dataclass
class Timeline:
    """Ticks of one second, with all incidents that ended and all transitions."""

    rules: dict[str, IncidentRules] = field(default_factory=lambda: RULES)
    table: IncidentTable = field(default_factory=IncidentTable)
    now: float = T0
    ended: list[Incident] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)

    def tick(
        self, *found: Finding, healed: bool | None = None, idle: bool = False, outcomes=(), seconds=1.0, over_since=None
    ) -> None:
        self.now += seconds
        ids = [incident.id for incident in self.table.incidents.values()]
        observed = Observed(found, dict.fromkeys(ids, healed), frozenset(ids if idle else ()), outcomes)
        if over_since is not None:
            observed = replace(observed, unprovable=dict.fromkeys(ids, over_since))
        self.table, ended, transitions = reduce(self.table, observed, self.rules, self.now)
        self.ended += ended
        self.transitions += transitions

    @property
    def incident(self) -> Incident:
        (incident,) = self.table.incidents.values()
        return incident

    def act(self, *records: dict[str, object]) -> None:
        records = records or ({"verb": "set_power_limit", "target": "gpu0", "outcome": "running", "detail": ""},)
        name, incident = next(iter(self.table.incidents.items()))
        self.table = replace(self.table, incidents={name: lifecycle.started(incident, records, self.now)})

    def outcome(self, ok: bool = True, number: int = 0) -> Outcome:
        return Outcome(self.incident.id, number, ok, "done" if ok else "no permission")
