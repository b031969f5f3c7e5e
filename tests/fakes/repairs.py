"""What a node's agent knows of its repairs."""

from __future__ import annotations

from opsd.collectors.base import RepairFact, RepairStep
from opsd.collectors.repairs import OUTCOMES, STEPS, Known


def known(state: str, tried: int, since: float | None = None) -> Known:
    """One repair in this state that has tried so many remedies."""
    steps = [RepairStep("reboot", 50.0, ok=True)] * tried
    steps += [RepairStep(state, 60.0)] * (state in STEPS)
    end = state if state in OUTCOMES else None
    return Known((RepairFact("repair-1", "n1", "gpu_xid", "Xid 95", 40.0, tuple(steps), end),), state, since)
