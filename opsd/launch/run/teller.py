"""What a launcher tells the head of the run, whoever that is just now."""

from __future__ import annotations

import time
from typing import Any

from opsd.launch.io.run_log import OF_ONE_LAUNCHER
from opsd.launch.quorum.port import Quorum
from opsd.launch.run.supervisor import Supervisor


class Teller:
    """Speaks for one launcher."""

    def __init__(self, node: Supervisor, quorum: Quorum) -> None:
        self._node = node
        self._quorum = quorum

    def tell(self, kind: str, **fields: Any) -> None:
        """Say something about the generation that runs here, with how far the run has come."""
        self._quorum.tell_head({"kind": kind, "generation": self._node.generation.number, **self.progress(), **fields})

    def tell_stop(self, by: str) -> None:
        """Pass on that ``by`` wants the run to stop."""
        self._quorum.tell_head({"kind": "stop", "by": by})

    def progress(self) -> dict[str, int | None]:
        """The furthest and the last committed step, as far as they are known here."""
        return {"furthest": self._node.progress.furthest, "committed": self._node.progress.committed}

    def relay(self, record: dict[str, object]) -> None:
        """Pass on an event that concerns the whole run, with its age: the clocks of two nodes may differ."""
        if record["event"] not in OF_ONE_LAUNCHER:
            age_s = time.time() - float(str(record["t"]))
            self._quorum.tell_head({"kind": "event", "record": record, "age_s": age_s})
