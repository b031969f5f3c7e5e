"""Members and plans as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opsd.launch.quorum.port import Member, Plan


def member_to_json(member: Member) -> list[str | int]:
    """``[name, address, port]``."""
    return [member.name, member.address, member.port]


def member_from_json(raw: Any) -> Member:
    """The member. Raises TypeError or ValueError."""
    name, address, port = raw
    return Member(str(name), str(address), int(port))


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as it is sent."""
    members = [member_to_json(member) for member in plan.members]
    return {"number": plan.number, "slots": plan.slots, "members": members, "payload": plan.payload}


def plan_from_json(raw: Mapping[str, Any]) -> Plan:
    """The plan. Raises KeyError, TypeError or ValueError."""
    members = tuple(member_from_json(member) for member in raw["members"])
    return Plan(int(raw["number"]), tuple(map(str, raw["slots"])), members, dict(raw["payload"]))
