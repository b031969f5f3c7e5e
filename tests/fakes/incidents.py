"""Incidents and findings for tests that do not care about their content."""

from __future__ import annotations

from dataclasses import replace

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
