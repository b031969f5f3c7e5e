"""A launcher as the others know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""Anything that JSON can carry."""


@dataclass(frozen=True, slots=True)
class Member:
    """A launcher: the name of its node and where it listens."""

    name: str
    address: str
    port: int


def member_to_json(member: Member) -> list[str | int]:
    """``[name, address, port]``."""
    return [member.name, member.address, member.port]


def member_from_json(raw: Any) -> Member:
    """The member. Raises TypeError or ValueError."""
    name, address, port = raw
    return Member(str(name), str(address), int(port))
