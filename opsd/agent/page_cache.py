"""Pages made once a second, however many people look at them during an incident."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from opsd.agent.loop import Snapshot


class PageCache:
    """Keeps what was made of the newest snapshot in the current second. Safe to be used from several threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._of: tuple[Snapshot, int] | None = None
        self._pages: dict[Hashable, bytes | None] = {}

    def get(self, key: Hashable, snapshot: Snapshot, now: float, make: Callable[[], bytes | None]) -> bytes | None:
        """The page ``key``, made by ``make`` unless somebody has asked for it in the second of ``now`` already.

        A snapshot that stays, because the loop hangs, is made anew each second: its page tells how old it is.
        """
        with self._guard:
            if self._of is None or self._of[0] is not snapshot or self._of[1] != int(now):
                self._of, self._pages = (snapshot, int(now)), {}
            if key not in self._pages:
                self._pages[key] = make()
            return self._pages[key]
