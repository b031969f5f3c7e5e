"""How many incidents there may be of what each user's runs say, so that nobody fills the memory or an inbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from opsd.runbooks.base import Finding

MAX_OF_USER: Final = 64
"""Current incidents of one user. A fault of a whole run is one; one of each rank of a node makes eight or sixteen."""

Name = tuple[str, str]


class Quota:
    """Remembers whose each incident is; ``exceeded`` are the users of whom the last tick had more than that."""

    def __init__(self) -> None:
        self._users: dict[Name, int] = {}
        self.exceeded: frozenset[int] = frozenset()

    def admit(
        self,
        findings: Sequence[Finding],
        told_by_users: Collection[str],
        current: Collection[Name],
        users: Mapping[str, int | None],
    ) -> list[Finding]:
        """The findings that may be, or become, an incident.

        Only the kinds ``told_by_users`` are limited. ``current`` are kind and key of the incidents there are, ``users``
        those of the runs on this node.
        """
        self._users = {name: user for name, user in self._users.items() if name in current}
        counts, admitted, exceeded = Counter(self._users.values()), [], set[int]()
        for finding in findings:
            name = finding.kind, finding.key
            user = users.get(finding.run) if finding.kind in told_by_users else None
            if user is not None and name not in self._users:
                if name not in current and counts[user] >= MAX_OF_USER:
                    exceeded.add(user)
                    continue
                counts[user] += 1
                self._users[name] = user
            admitted.append(finding)
        self.exceeded = frozenset(exceeded)
        return admitted
