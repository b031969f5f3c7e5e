"""What a launcher tells the head of the run, whoever that is just now."""

from __future__ import annotations

import time

from opsd.launch.claims.port import Group
from opsd.launch.io.run_log import OF_ONE_LAUNCHER
from opsd.launch.run.messages import CODEC, Event, Progress, Told
from opsd.launch.run.supervisor import Supervisor


class Teller:
    """Speaks for one launcher."""

    def __init__(self, node: Supervisor, group: Group) -> None:
        self._node = node
        self._group = group

    @property
    def generation(self) -> int:
        """The generation that runs here."""
        return self._node.generation.number

    def tell(self, message: Told) -> None:
        """Say something."""
        self._group.tell_head(CODEC.encode(message))

    def tell_progress(self) -> None:
        """Say how far the run has come, as far as it is known here."""
        progress = self._node.progress
        self.tell(Progress(self.generation, progress.furthest, progress.committed))

    def relay(self, record: dict[str, object]) -> None:
        """Pass on an event that concerns the whole run, with its age: the clocks of two nodes may differ."""
        if record["event"] not in OF_ONE_LAUNCHER:
            self.tell(Event(record, time.time() - float(str(record["t"]))))
