"""A launcher's control socket without a launcher."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any


class SwappingLauncher:
    """A run on ``nodes`` with ``spares`` that swaps when asked, ``slowly`` meaning never; listens at ``control``.

    Without spares it has those of the ``pool`` once it was asked to swap.
    ``requests`` are those that it got, questions for its status left out.
    """

    def __init__(
        self,
        nodes: list[str],
        spares: list[str],
        *,
        control: Path | None = None,
        run: str = "r",
        slowly: bool = False,
        pool: list[str] | None = None,
    ) -> None:
        self.nodes, self.spares, self._run, self._slowly, self._pool = nodes, spares, run, slowly, pool
        self.requests: list[dict[str, Any]] = []
        if control is not None:
            control.parent.mkdir(parents=True, exist_ok=True)
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(control))
            self._listener.listen()
            threading.Thread(target=self._serve, daemon=True).start()

    def __call__(self, request: Any) -> dict[str, Any]:
        """The answer to one request."""
        if request["cmd"] == "status":
            members = {"nodes": self.nodes, "spares": self.spares, "head": self.nodes[0]}
            return {"ok": True, "run": self._run, "waits": self._pool is not None, **members}
        self.requests.append(dict(request))
        if not self.spares and self._pool is not None:
            self.spares = self._pool
            return {"ok": False, "error": "the run has no spare; one has been asked for", "coming": True}
        if not self.spares:
            return {"ok": False, "error": "the run has no spare"}
        if not self._slowly:
            spare, *self.spares = self.spares
            self.nodes = [spare if name == request["node"] else name for name in self.nodes]
        return {"ok": True}

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rwb") as stream:
                stream.write(json.dumps(self(json.loads(stream.readline()))).encode() + b"\n")
