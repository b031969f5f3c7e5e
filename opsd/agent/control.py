"""The agent's control socket: root and the agent's own user acknowledge and close incidents of this node."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any, Final

from opsd.agent.by_hand import PATIENCE_S, SOCKET, WRITE_S, Order
from opsd.agent.journal import Journal
from opsd.agent.logs import Log
from opsd.agent.responder import Responder
from opsd.launch.io.control import ControlServer
from opsd.launch.io.loop import Loop
from opsd.words import printable

MAX_NAME: Final = 64
MAX_REASON: Final = 500
MAX_FOR_S: Final = 366 * 86_400.0


class Control:
    """Takes orders from a Unix socket in the state folder, in a thread of its own; the responder carries them out.

    It opens once the journal can be written: the journal's lock then keeps a second agent off the same folder.
    ``after_tick`` is for the thread of the loop.
    """

    def __init__(self, responder: Responder, journal: Journal, log: Log, *, patience_s: float = PATIENCE_S) -> None:
        self._responder, self._journal, self._log = responder, journal, log
        self._patience_s = patience_s
        self._order: Order | None = None
        self._carried_out = threading.Event()
        self._loop: Loop | None = None
        self._server: ControlServer | None = None

    @property
    def path(self) -> Path:
        """The path of the socket."""
        return self._journal.path.with_name(SOCKET)

    def after_tick(self) -> None:
        """Open the socket once that is possible, and answer who waits for an order that is carried out."""
        if self._loop is None and not self._journal.problem:
            self._loop = Loop()
            self._server = ControlServer(self.path, self._loop, self._handle, self._say)
            threading.Thread(target=self._loop.run, name="control", daemon=True).start()
        order = self._order
        if order is not None and (order.done or order.error):
            self._carried_out.set()

    def close(self) -> None:
        """Remove the socket."""
        if self._loop is not None and self._server is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self.path.unlink(missing_ok=True)

    def _say(self, problem: str) -> None:
        self._log.warning("incidents cannot be acknowledged", problem=problem)

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        order = parse(request)
        if isinstance(order, str):
            return {"ok": False, "error": order}
        self._carried_out.clear()
        self._order = order
        self._responder.orders.put(order)
        if not self._carried_out.wait(self._patience_s):
            return {"ok": False, "error": "the agent's loop hangs; it does this as soon as it goes on"}
        if order.error:
            return {"ok": False, "error": order.error}
        written = self._journal.flush(WRITE_S) and not self._journal.problem
        lost = "" if written else f"; not in the journal yet: {self._journal.problem or 'the disk is slow'}"
        return {"ok": True, "said": order.done + lost}


def parse(request: dict[str, Any]) -> Order | str:
    """The order in ``request``, or what is wrong with it in one sentence."""
    verb, incident, by = (request.get(name) for name in ("cmd", "incident", "by"))
    if verb not in ("ack", "close"):
        return f"an agent knows the commands ack and close, not {verb!r}"
    if not isinstance(incident, str) or not incident:
        return "the incident has no id"
    if not isinstance(by, str) or not (name := printable(by).strip()) or len(name) > MAX_NAME:
        return f"a name has 1 to {MAX_NAME} characters"
    if verb == "ack":
        for_s = request.get("for_s")
        if for_s is None:
            return Order("ack", incident, name)
        if not isinstance(for_s, int | float) or not math.isfinite(for_s) or not 0 < for_s <= MAX_FOR_S:
            return "the time is not between a second and a year"
        return Order("ack", incident, name, for_s=float(for_s))
    said = request.get("reason")
    if not isinstance(said, str) or not (reason := printable(said).strip()) or len(reason) > MAX_REASON:
        return f"a reason has 1 to {MAX_REASON} characters"
    return Order("close", incident, name, reason=reason)
