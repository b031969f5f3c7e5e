"""Messages that are sent again until they are confirmed, and heard once, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
Parcel = tuple[int, int, Body]
"""A message as it travels: its number, that of the oldest one which is not confirmed, and itself."""


@dataclass(slots=True)
class Outbox:
    """Messages for somebody, numbered from ``next`` on and kept until they are confirmed."""

    next: int = 1
    _waiting: deque[tuple[int, Body]] = field(default_factory=deque)

    @property
    def last(self) -> int:
        """The number of the newest message."""
        return self.next - 1

    def add(self, body: Body) -> Parcel:
        """Keep a message; returns how it travels."""
        self._waiting.append((self.next, body))
        self.next += 1
        return self._parcel(self.last, body)

    def confirm(self, number: int) -> None:
        """Everything up to ``number`` has arrived."""
        while self._waiting and self._waiting[0][0] <= number:
            self._waiting.popleft()

    @property
    def waiting(self) -> tuple[Body, ...]:
        """What has not been confirmed, oldest first."""
        return tuple(body for _, body in self._waiting)

    def again(self) -> Iterator[Parcel]:
        """All that has not been confirmed, as it travels."""
        for number, body in tuple(self._waiting):
            yield self._parcel(number, body)

    def _parcel(self, number: int, body: Body) -> Parcel:
        oldest = self._waiting[0][0] if self._waiting else self.next
        return number, oldest, body


@dataclass(slots=True)
class Inbox:
    """What has been heard of somebody."""

    heard: int = 0
    """The number of the last message."""

    def take(self, number: int, oldest: int, body: Body) -> Body | None:
        """The message if it is the next one; those before the sender's oldest were heard by somebody else."""
        if number != max(self.heard + 1, oldest):
            return None
        self.heard = number
        return body
