"""One launcher's claims: at most one is under way, the newest wish replaces those before it, errors are tried again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.port import Folder

AGAIN_S = 1.0


class Claiming:
    """``new`` makes the claim with the next number of a plan."""

    def __init__(self, folder: Folder, new: Callable[[dict[str, Any]], Claim]) -> None:
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
            self._due = now + AGAIN_S
        if mine is None and claim.number > known and claim.plan == self._newest:
            self._wanted = self._newest
        return claim
