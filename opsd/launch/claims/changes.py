"""A claim told by what it changes: of thousands of launchers, not each has to read all of it from the run's folder.

The folder still decides. A claim that was sent counts as the file of its number once that file is the newest. Who
cannot put the claim together, because it knows another generation or was not reached, reads the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.claim_store import Plan, listening
from opsd.launch.claims.messages import Claimed

MOST_CHANGES = 256
"""With more, every launcher reads the file, 0.55 MB among 10,000. So many, 128 nodes that were replaced, are 3.5 kB,
and take 0.12 s of the leader of 10,000."""


def changes_of(claim: Claim, plan: Plan, base: Plan, size: int) -> Claimed | None:
    """What ``claim`` of ``plan`` changes in the plan ``base``, where nodes have ``size`` ranks; None if it is much."""
    before, there = {*base.members}, {member.name for member in plan.members}
    joined = tuple(member for member in plan.members if member not in before)
    left = tuple(member.name for member in base.members if member.name not in there)
    places = {str(place): name for place, name in enumerate(plan.slots) if base.slots[place : place + 1] != (name,)}
    sizes = {name: other for name, other in plan.sizes.items() if other != size}
    if len(joined) + len(left) + len(places) + len(sizes) > MOST_CHANGES:
        return None
    return Claimed(
        claim.number, base.number, claim.launcher, claim.keeps, _mark(claim.plan),
        len(plan.slots), places, joined, left, size, sizes, dict(plan.payload), plan.leader_listens,
    )  # fmt: skip


def claim_from(message: Claimed, base: Plan, leader: str, start: str) -> Claim | None:
    """The claim of ``leader`` in ``message``; None if it does not follow from the plan ``base``."""
    if message.base != base.number or not 0 <= message.slots <= len(base.slots) + len(message.places):
        return None
    gone = {*message.left, *(member.name for member in message.joined)}
    members = [*(member for member in base.members if member.name not in gone), *message.joined]
    members.sort(key=lambda member: member.name)
    kept = (*base.slots, *("" for _ in message.places))
    slots = tuple(message.places.get(str(place), kept[place]) for place in range(message.slots))
    sizes = {member.name: message.sizes.get(member.name, message.size) for member in members}
    told = listening(members, leader, message.listens)
    plan = Plan(message.number, leader, slots, told, sizes, message.payload).to_json()
    if _mark(plan) != message.mark:
        return None
    return Claim(message.number, start, message.launcher, plan=plan, keeps=message.keeps)


def _mark(plan: Mapping[str, Any]) -> str:
    """The digest of a plan in a claim."""
    return blake2b(json.dumps(plan, sort_keys=True).encode(), digest_size=16).hexdigest()
