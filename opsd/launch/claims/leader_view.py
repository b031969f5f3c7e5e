"""What a leader needs of its group: who is there, the newest plan, and a way to propose, to tell and to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.messages import Body
from opsd.launch.io.protocol import Member


class LeaderView(Protocol):
    """Implemented by ``Group``, and under a virtual clock by ``opsd.simulate``."""

    @property
    def plan(self) -> Plan | None:
        """The newest plan, None before the first."""

    @property
    def alive(self) -> Mapping[str, Member]:
        """The launchers that are heard, by name."""

    @property
    def begun(self) -> bool:
        """Whether the ranks of the newest plan were started."""

    @property
    def leaderless_s(self) -> float:
        """Seconds since the previous leader was heard from."""

    @property
    def inherited(self) -> Mapping[str, Any]:
        """What the leader of an earlier start left with an end that asked for this one; empty if nothing."""

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> None:
        """Claim the next generation; a later proposal replaces this one."""

    def end(self, code: int, reason: str, lost: Sequence[str], unfit: Sequence[str], memory: Mapping[str, Any]) -> None:
        """Claim the end of the run; ``memory`` is ``inherited`` by the leader of the next start."""

    def tell_all(self, body: Body) -> None:
        """Send to every live launcher, this one included."""
