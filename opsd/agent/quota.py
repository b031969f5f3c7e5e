"""How many incidents there may be of what each user's runs say, so that nobody fills the memory or an inbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from opsd.runbooks.base import Finding

MAX_OF_USER: Final = 64
"""Incidents of one user, current ones and those of the last ``REST_S``.

A fault of a whole run is one; one of each rank of a node makes eight or sixteen.
"""
MAX_OF_OTHERS: Final = 256
"""Incidents of all users together of whom no rank works on a GPU: a user namespace gives a user 65,536 user ids."""
OTHERS: Final = -1
"""Stands for these users."""
REST_S: Final = 600.0
"""An incident counts for so long after its end, or runs that last for seconds would open any number of them."""

Name = tuple[str, str]


class Quota:
    """Remembers whose each incident is; ``exceeded`` are the users of whom the last tick had more than that.

    Findings whose run was never seen with its user count together, as those of one user more. ``OTHERS`` is among
    ``exceeded`` if their limit leaves findings out.
    """

    def __init__(self) -> None:
        self._held: dict[Name, tuple[int | None, float]] = {}
        self._users: dict[str, int] = {}
        self._working: dict[int | None, float] = {}
        self.exceeded: frozenset[int | None] = frozenset()

    def admit(
        self,
        findings: Sequence[Finding],
        told_by_users: Collection[str],
        current: Collection[Name],
        users: Mapping[str, int | None],
        now: float,
        working: Collection[int] = (),
    ) -> list[Finding]:
        """The findings that may be, or become, an incident, at the monotonic second ``now``.

        Only findings about a run are limited, of the kinds ``told_by_users``. ``current`` are kind and key of the
        incidents there are, ``users`` those of the runs on this node, ``working`` those with a rank on a GPU.
        """
        self._held = {
            name: (user, now if name in current else since)
            for name, (user, since) in self._held.items()
            if name in current or now - since < REST_S
        }
        self._learn_users(findings, users)
        self._working = {user: at for user, at in self._working.items() if now - at < REST_S}
        self._working.update(dict.fromkeys(working, now))
        counts, admitted, exceeded = Counter(user for user, _ in self._held.values()), [], set[int | None]()
        others = sum(number for user, number in counts.items() if user not in self._working)
        for finding in findings:
            name, run = (finding.kind, finding.key), finding.run
            if run and finding.kind in told_by_users and name not in self._held:
                user = self._users.get(run)
                own, shared = counts[user] >= MAX_OF_USER, user not in self._working and others >= MAX_OF_OTHERS
                if name not in current and (own or shared):
                    exceeded.add(user if own else OTHERS)
                    continue
                counts[user] += 1
                others += user not in self._working
                self._held[name] = user, now
            admitted.append(finding)
        self.exceeded = frozenset(exceeded)
        return admitted

    def _learn_users(self, findings: Sequence[Finding], users: Mapping[str, int | None]) -> None:
        """A run that is gone is still found in the events of the last minutes: it keeps its user for so long."""
        known = {run: user for run, user in users.items() if user is not None}
        found = {finding.run for finding in findings}
        self._users = {run: user for run, user in self._users.items() if run in found} | known
