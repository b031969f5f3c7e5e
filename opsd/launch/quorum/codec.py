"""Members, plans and answers as JSON, small enough to be sent to a thousand launchers at once."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

from opsd.launch.io.member import Message, member_from_json, member_to_json
from opsd.launch.quorum.port import Plan

MAX_UNPACKED = 64 << 20


def plan_to_json(plan: Plan, base: Plan | None = None) -> dict[str, Any]:
    """The plan as it is sent; to those who know ``base`` with what differs in its members only.

    The members of a plan are in the order of their names.
    """
    known = set(base.members) if base is not None else set()
    names = {member.name for member in plan.members}
    return {
        "number": plan.number,
        "slots": plan.slots,
        "come": [member_to_json(member) for member in plan.members if member not in known],
        "gone": [member.name for member in base.members if member.name not in names] if base is not None else [],
        "payload": plan.payload,
    }


def plan_from_json(raw: Mapping[str, Any], base: Plan | None = None) -> Plan:
    """The plan. Raises KeyError, TypeError or ValueError."""
    come = [member_from_json(member) for member in raw["come"]]
    replaced = {*raw["gone"], *(member.name for member in come)}
    kept = [member for member in base.members if member.name not in replaced] if base is not None else []
    members = tuple(sorted((*kept, *come), key=lambda member: member.name)) if come else tuple(kept)
    return Plan(int(raw["number"]), tuple(raw["slots"]), members, raw["payload"])


class Answers(Mapping[str, Message]):
    """What the members of a plan have answered, packed as it is sent and unpacked when somebody looks."""

    def __init__(self, packed: str) -> None:
        self.packed = packed
        self._answers: dict[str, Message] | None = None

    @classmethod
    def of(cls, answers: Mapping[str, Message]) -> Self:
        """Pack them."""
        return cls(base64.b64encode(zlib.compress(json.dumps(answers).encode(), 1)).decode())

    def _unpacked(self) -> dict[str, Message]:
        if self._answers is None:
            unpacked = json.loads(zlib.decompressobj().decompress(base64.b64decode(self.packed), MAX_UNPACKED))
            self._answers = dict(unpacked)
        return self._answers

    def __getitem__(self, name: str) -> Message:
        return self._unpacked()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unpacked())

    def __len__(self) -> int:
        return len(self._unpacked())
