"""Messages that are sent again until they are confirmed, and heard once, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opsd.launch.io.member import Message


@dataclass(slots=True)
class Outbox:
    """Messages for somebody, numbered from ``next`` on and kept until they are confirmed."""

    next: int = 1
    _waiting: deque[tuple[int, Message]] = field(default_factory=deque)

    @property
    def last(self) -> int:
        """The number of the newest message."""
        return self.next - 1

    def add(self, body: Message) -> dict[str, Any]:
        """Keep a message; returns how it travels."""
        self._waiting.append((self.next, body))
        self.next += 1
        return self._parcel(self.last, body)

    def confirm(self, number: int) -> None:
        """Everything up to ``number`` has arrived."""
        while self._waiting and self._waiting[0][0] <= number:
            self._waiting.popleft()

    @property
    def waiting(self) -> tuple[Message, ...]:
        """What has not been confirmed, oldest first."""
        return tuple(body for _, body in self._waiting)

    def again(self) -> Iterator[dict[str, Any]]:
        """All that has not been confirmed, as it travels."""
        for number, body in tuple(self._waiting):
            yield self._parcel(number, body)

    def _parcel(self, number: int, body: Message) -> dict[str, Any]:
        oldest = self._waiting[0][0] if self._waiting else self.next
        return {"number": number, "oldest": oldest, "body": body}


@dataclass(slots=True)
class Inbox:
    """What has been heard of somebody."""

    heard: int = 0
    """The number of the last message."""

    def take(self, parcel: Message) -> Message | None:
        """The message if it is the next one; those before the sender's oldest were heard by somebody else."""
        number = int(parcel["number"])
        if number != max(self.heard + 1, int(parcel["oldest"])):
            return None
        self.heard = number
        body: Message = parcel["body"]
        return body


@dataclass(slots=True)
class Mail:
    """All that a launcher has sent and heard: to and from the head, and as the head to and from the others."""

    to_head: Outbox
    of_head: Inbox = field(default_factory=Inbox)
    to: dict[str, Outbox] = field(default_factory=dict)
    of: dict[str, Inbox] = field(default_factory=dict)

    def forget(self, name: str) -> None:
        """This one is gone; should it come back, it begins anew."""
        self.to.pop(name, None)
        self.of.pop(name, None)
