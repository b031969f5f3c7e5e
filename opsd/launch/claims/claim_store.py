"""The run's folder as the authority on generations: plans in claims, polling the newest claim, and writing claims."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from opsd.checkpoints.claims import Claim
from opsd.launch.io.protocol import Member, member_from_json, member_to_json

POLL_S = 1.0
REPOLL_S = 0.2
"""After a read that failed or returned an older state than is known."""
MANY = 64
"""With more launchers the claims are read less often; the lease names the newest generation as well."""
TELLING_S = 0.5
"""For so long the maker of a claim may be telling many launchers of it; who hears that it exists need not read it."""
UNLED_POLL_S = 2.0
"""A launcher without a leader has only the folder, and looks this often among any number of launchers."""
GAP_S = 3.0
"""Between reads further apart than this the lease may have been renewed unseen."""
CLAIM_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Generation ``number``: its leader, and the role of each node.

    ``slots`` are the nodes that run ranks, by node rank; without any the run waits for nodes. ``members`` are the
    launchers present, spares included; ``sizes`` is the number of ranks per node. ``payload`` is the leader's state for
    its successors; ``payload["keep"]`` is the generation whose ranks keep running, 0 if all ranks are restarted.
    """

    number: int
    leader: str
    slots: tuple[str, ...]
    members: tuple[Member, ...]
    sizes: Mapping[str, int]
    payload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """The generation of ranks that runs under this plan: its own, or the one that is kept."""
        return int(self.payload.get("keep", 0)) or self.number

    @property
    def spares(self) -> tuple[str, ...]:
        """The members that run no ranks."""
        slots = set(self.slots)
        return tuple(member.name for member in self.members if member.name not in slots)

    def member(self, name: str) -> Member | None:
        """The launcher ``name``, None if it is not a member."""
        return next((member for member in self.members if member.name == name), None)

    @property
    def leader_listens(self) -> str:
        """The IP address of the leader as it says itself, "" if it has said none."""
        leader = self.member(self.leader)
        return leader.listens if leader is not None else ""

    def to_json(self) -> dict[str, Any]:
        """The content of a claim."""
        return {
            "head": self.leader,
            "head_listens": self.leader_listens,
            "slots": list(self.slots),
            "members": [member_to_json(member) for member in self.members],
            "sizes": dict(self.sizes),
            "payload": dict(self.payload),
        }

    @classmethod
    def from_json(cls, number: int, raw: Mapping[str, Any]) -> Self:
        """The plan in a claim. Raises KeyError, TypeError or ValueError if it is malformed."""
        slots, payload = tuple(map(str, raw["slots"])), raw["payload"]
        members = listening(map(member_from_json, raw["members"]), str(raw["head"]), str(raw.get("head_listens", "")))
        sizes = {str(name): int(size) for name, size in raw["sizes"].items()}
        if not isinstance(payload, dict) or not set(slots) <= {member.name for member in members} & sizes.keys():
            raise ValueError(raw)
        return cls(number, str(raw["head"]), slots, members, sizes, payload)


def listening(members: Iterable[Member], name: str, address: str) -> tuple[Member, ...]:
    """``members``, of which ``name`` listens at the IP ``address``."""
    return tuple(replace(one, listens=address) if one.name == name else one for one in members)


@dataclass(frozen=True, slots=True)
class StoreRead:
    """The result of one read: the lease, and the newest claim if it was a ``full`` read."""

    lease: tuple[int, int]
    claim: Claim | None
    full: bool

    @property
    def number(self) -> int:
        """The number of the newest claim, 0 if there is none."""
        return self.claim.number if self.claim is not None else 0


class ClaimStore(Protocol):
    """The claims in the run's folder. Nothing blocks; results arrive at ``Group.store_read`` and ``Group.claimed``.

    At most one read and one claim are in flight.
    """

    @property
    def error(self) -> OSError | None:
        """Why the latest read or claim failed; None if it did not."""

    def read(self, *, full: bool) -> None:
        """Read the lease, and the newest claim if ``full`` or if the lease names an unknown one."""

    def told(self, claim: Claim) -> None:
        """The maker of ``claim`` says that it has made it: its file need not be read if it is the newest."""

    def claim(self, claim: Claim) -> None:
        """Create a claim."""

    def renew(self, number: int, beat: int) -> None:
        """Renew the lease."""


class StorePoller:
    """Reads the store once a second, and on request. One read is in flight at a time."""

    def __init__(self, folder: ClaimStore, now: float) -> None:
        self.last = now
        """When the store answered last."""
        self.confirmed = 0
        """The newest full read that has found no newer claim than the one known."""
        self._folder = folder
        self._pending = False
        self._launchers = 0
        self._begun = 0
        """Number of full reads begun."""
        self._due = self._whole_due = self._asked_at = now
        self._beat = (0, 0)
        self._moved = now

    def request(self, now: float) -> int:
        """Read now; returns the number of the first full read that begins after this call."""
        first = self._begun + 1
        self._due = self._whole_due = now
        self._go(now, full=True)
        return first

    def expect(self, now: float, launchers: int) -> None:
        """There is a newer claim, which its maker may be about to tell; among a few launchers it is read at once."""
        if launchers <= MANY:
            self.request(now)
        else:
            self._due = self._whole_due = min(self._due, now + TELLING_S)

    def tick(self, now: float, launchers: int, *, led: bool = True) -> None:
        """Read if it is due; ``led``: a leader is heard from."""
        self._launchers = launchers
        due = self._due if led else min(self._due, self._asked_at + UNLED_POLL_S)
        if now < due or self._pending:
            return
        self._go(now, full=now >= self._whole_due)

    def _go(self, now: float, *, full: bool) -> None:
        if self._pending:
            return
        self._pending = True
        self._asked_at = now
        self._due = now + POLL_S * max(1.0, self._launchers / (4 * MANY))
        if full:
            self._whole_due = now + POLL_S * max(1.0, self._launchers / MANY)
            self._begun += 1
        self._folder.read(full=full)

    def answered(self, now: float, found: StoreRead | None, known: int) -> None:
        """A read has returned, None if it failed; ``known`` is the newest claim number known."""
        self._pending = False
        if found is None or (found.full and found.number < known):
            self._due = self._whole_due = now + REPOLL_S
        elif found.full and max(found.number, found.lease[0]) == known:
            self.confirmed = self._begun
        if found is not None:
            self._note_lease(now, found.lease, known)
            self.last = now

    def _note_lease(self, now: float, lease: tuple[int, int], known: int) -> None:
        if now - self.last > GAP_S or (lease != self._beat and lease[0] >= known):
            self._moved = now
        self._beat = lease

    def renewed(self, now: float) -> None:
        """Another launcher has just started to lead."""
        self._moved = now

    def lease_idle_s(self, now: float) -> float:
        """For how many seconds reads have shown an unchanged lease; 0 while the store does not answer."""
        return self.last - self._moved if now - self.last < GAP_S else 0.0


class ClaimWriter:
    """Writes one claim at a time; a newer request replaces waiting ones, and errors are retried.

    ``new`` makes the claim with the next number from a plan.
    """

    def __init__(self, folder: ClaimStore, new: Callable[[dict[str, Any]], Claim]) -> None:
        self.failing_since: float | None = None
        """Since when claims fail: a folder that cannot be written may still be readable."""
        self._folder = folder
        self._new = new
        self._requested: dict[str, Any] | None = None
        self._newest: dict[str, Any] | None = None
        """The newest request, kept while it is in flight."""
        self._pending: Claim | None = None
        self._due = 0.0

    @property
    def busy(self) -> bool:
        """Whether a request waits or is in flight."""
        return self._requested is not None or self._pending is not None

    @property
    def replacing(self) -> bool:
        """Whether the request that waits or is in flight ends the running ranks."""
        plan = self._pending.plan if self._pending is not None else self._requested
        return plan is not None and not plan.get("payload", {}).get("keep")

    def request(self, plan: dict[str, Any]) -> None:
        """Claim ``plan`` once the claim in flight is settled."""
        self._requested = self._newest = json.loads(json.dumps(plan))
        self._due = 0.0

    def forget(self) -> None:
        """Drop the request; a claim in flight may still succeed."""
        self._requested = self._newest = None

    def made(self, plan: Mapping[str, Any]) -> None:
        """A claim of ``plan`` exists: do not repeat it if its answer was lost."""
        if self._requested == plan:
            self._requested = None

    def answers(self, plan: Mapping[str, Any]) -> bool:
        """Whether a claim of ``plan`` is the latest request, or the latest request will follow it.

        If not, it is a late success of an earlier request.
        """
        return self._requested is not None or plan == self._newest

    def tick(self, now: float) -> None:
        """Write the requested claim if it is due."""
        if self._requested is not None and self._pending is None and now >= self._due:
            plan, self._requested = self._requested, None
            self._pending = self._new(plan)
            self._folder.claim(self._pending)

    def settled(self, now: float, mine: bool | None, known: int) -> Claim:
        """Return the claim that was in flight. It is retried if its result is unknown.

        It is not retried if ``known``, the newest number known, shows that it was made. A newer request survives a
        failure of the claim before it.
        """
        claim, self._pending = self._pending, None
        assert claim is not None
        if not mine:
            self._due = now + CLAIM_RETRY_S
        if mine is not None:
            self.failing_since = None
        elif self.failing_since is None:
            self.failing_since = now
        if mine is None and claim.number > known and claim.plan == self._newest:
            self._requested = self._newest
        return claim
