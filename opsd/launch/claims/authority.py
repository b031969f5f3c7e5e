"""The run's folder, which alone decides: what a claim there says, how fresh what is known is, and making a claim."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from opsd.checkpoints.claims import Claim
from opsd.launch.io.protocol import Member, member_from_json, member_to_json

LOOK_S = 1.0
LOOK_AGAIN_S = 0.2
"""After a look that failed, or came back with less than is known."""
MANY = 64
"""With more launchers the whole folder is read more rarely; the lease names the newest generation as well."""
GAP_S = 3.0
"""If answers were further apart than this nothing can be said of the lease in between."""
CLAIM_AGAIN_S = 1.0
_RESTARTS = re.compile(r"(?P<job>.*, job [^,]*)\.(?P<count>\d+)(, .*)?")


@dataclass(frozen=True, slots=True)
class Plan:
    """Generation ``number``: who leads it, and who does what in it.

    ``slots`` are the nodes that run ranks, by node rank; without any the run waits for nodes. ``members`` are the
    launchers that were there, spares included, and ``sizes`` how many ranks each node has. ``payload`` is what the
    leader leaves to its successors; ``keep`` in it is the generation whose ranks run on, 0 if they are restarted.
    """

    number: int
    leader: str
    slots: tuple[str, ...]
    members: tuple[Member, ...]
    sizes: Mapping[str, int]
    payload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """The generation of ranks that runs under this plan: its own, or the one that it keeps running."""
        return int(self.payload.get("keep", 0)) or self.number

    @property
    def spares(self) -> tuple[str, ...]:
        """The members that run no ranks."""
        return tuple(member.name for member in self.members if member.name not in self.slots)

    def member(self, name: str) -> Member | None:
        """The launcher ``name``, None if it was not there."""
        return next((member for member in self.members if member.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """As it stands in a claim."""
        return {
            "head": self.leader,
            "slots": list(self.slots),
            "members": [member_to_json(member) for member in self.members],
            "sizes": dict(self.sizes),
            "payload": dict(self.payload),
        }

    @classmethod
    def from_json(cls, number: int, raw: Mapping[str, Any]) -> Self:
        """The plan in a claim. Raises KeyError, TypeError or ValueError for what is none."""
        slots, payload = tuple(map(str, raw["slots"])), raw["payload"]
        members = tuple(member_from_json(member) for member in raw["members"])
        sizes = {str(name): int(size) for name, size in raw["sizes"].items()}
        if not isinstance(payload, dict) or not set(slots) <= {member.name for member in members} & sizes.keys():
            raise ValueError(raw)
        return cls(number, str(raw["head"]), slots, members, sizes, payload)


@dataclass(frozen=True, slots=True)
class Look:
    """What was found: the lease, and the newest claim unless only the lease was read."""

    lease: tuple[int, int]
    claim: Claim | None
    whole: bool

    @property
    def number(self) -> int:
        """Of the newest claim, 0 if there is none."""
        return self.claim.number if self.claim is not None else 0


class Folder(Protocol):
    """The claims in the run's folder. Nothing here waits; answers come by ``Group.looked`` and ``Group.claimed``.

    One look and one claim may be under way at a time.
    """

    @property
    def error(self) -> OSError | None:
        """Why the newest look, or the newest claim, has failed; None while all is well."""

    def look(self, *, whole: bool) -> None:
        """Read the lease, and the newest claim if ``whole`` or if the lease names one that is not known."""

    def claim(self, claim: Claim) -> None:
        """Make a claim."""

    def renew(self, number: int, beat: int) -> None:
        """Renew the lease."""


class Looks:
    """``folder`` is asked once a second, and when somebody wants to know. One look is under way at a time."""

    def __init__(self, folder: Folder, now: float) -> None:
        self.last = now
        """When the folder answered last."""
        self.confirmed = 0
        """The last look that has shown that nothing newer was claimed than what is known."""
        self._folder = folder
        self._flying = False
        self._begun = 0
        """Looks at the whole folder so far."""
        self._due = self._whole_due = now
        self._beat = (0, 0)
        self._moved = now

    def want(self, now: float) -> int:
        """Look at once; returns the number of the first look that begins from now on."""
        first = self._begun + 1
        self._due = self._whole_due = now
        self._go(now, whole=True)
        return first

    def tick(self, now: float, launchers: int) -> None:
        """Look if it is time."""
        if now < self._due or self._flying:
            return
        whole = now >= self._whole_due
        self._due = now + LOOK_S * max(1.0, launchers / (4 * MANY))
        if whole:
            self._whole_due = now + LOOK_S * max(1.0, launchers / MANY)
        self._go(now, whole=whole)

    def _go(self, now: float, *, whole: bool) -> None:
        if self._flying:
            return
        self._flying = True
        self._due = max(self._due, now + LOOK_S)
        if whole:
            self._whole_due = max(self._whole_due, self._due)
            self._begun += 1
        self._folder.look(whole=whole)

    def answered(self, now: float, found: Look | None, known: int) -> None:
        """A look has come back, None if it failed; ``known`` is the newest number that is known."""
        self._flying = False
        if found is None or (found.whole and found.number < known):
            self._due = self._whole_due = now + LOOK_AGAIN_S
        elif found.whole and max(found.number, found.lease[0]) == known:
            self.confirmed = self._begun
        if found is not None:
            self._note_lease(now, found.lease, known)
            self.last = now

    def _note_lease(self, now: float, lease: tuple[int, int], known: int) -> None:
        if now - self.last > GAP_S or (lease != self._beat and lease[0] >= known):
            self._moved = now
        self._beat = lease

    def renewed(self, now: float) -> None:
        """Somebody has just begun to lead."""
        self._moved = now

    def lease_idle_s(self, now: float) -> float:
        """For how long looks have shown that nobody renews the lease; 0 while that cannot be seen."""
        return self.last - self._moved if now - self.last < GAP_S else 0.0


class Claiming:
    """One claim is under way at a time, the newest wish replaces those before it, and errors are tried again.

    ``new`` makes the claim with the next number of a plan.
    """

    def __init__(self, folder: Folder, new: Callable[[dict[str, Any]], Claim]) -> None:
        self.failing_since: float | None = None
        """Since when claims fail; a folder that cannot be written may be read all the same."""
        self._folder = folder
        self._new = new
        self._wanted: dict[str, Any] | None = None
        self._newest: dict[str, Any] | None = None
        """The newest wish, also once it is under way."""
        self._flying: Claim | None = None
        self._due = 0.0

    @property
    def busy(self) -> bool:
        """Whether something is wanted or under way."""
        return self._wanted is not None or self._flying is not None

    @property
    def replacing(self) -> bool:
        """Whether what is wanted or under way ends the ranks that run."""
        plan = self._flying.plan if self._flying is not None else self._wanted
        return plan is not None and not plan.get("payload", {}).get("keep")

    def want(self, plan: dict[str, Any]) -> None:
        """Claim ``plan``, once the claim under way is settled."""
        self._wanted = self._newest = json.loads(json.dumps(plan))
        self._due = 0.0

    def forget(self) -> None:
        """Nothing is wanted any more; what is under way may be made all the same."""
        self._wanted = self._newest = None

    def made(self, plan: Mapping[str, Any]) -> None:
        """A claim of ``plan`` stands: if its answer was lost it is not to be made again."""
        if self._wanted == plan:
            self._wanted = None

    def answers(self, plan: Mapping[str, Any]) -> bool:
        """Whether a claim of ``plan`` is what was wanted last, or what is wanted last will follow it.

        If not it was made at an earlier time, and landed late.
        """
        return self._wanted is not None or plan == self._newest

    def tick(self, now: float) -> None:
        """Claim what is wanted, if it is time."""
        if self._wanted is not None and self._flying is None and now >= self._due:
            plan, self._wanted = self._wanted, None
            self._flying = self._new(plan)
            self._folder.claim(self._flying)

    def settled(self, now: float, mine: bool | None, known: int) -> Claim:
        """The claim that was under way. If it is not known whether it was made, it is tried again.

        Not if it is: ``known`` is the newest number that is known. A newer wish outlives the failure of the one before.
        """
        claim, self._flying = self._flying, None
        assert claim is not None
        if not mine:
            self._due = now + CLAIM_AGAIN_S
        if mine is not None:
            self.failing_since = None
        elif self.failing_since is None:
            self.failing_since = now
        if mine is None and claim.number > known and claim.plan == self._newest:
            self._wanted = self._newest
        return claim


def is_older(start: str, than: str) -> bool:
    """Whether ``start`` is the same Slurm job's as ``than``, before a requeue."""
    one, other = _RESTARTS.fullmatch(start), _RESTARTS.fullmatch(than)
    if one is None or other is None:
        return False
    return one["job"] == other["job"] and int(one["count"]) < int(other["count"])
