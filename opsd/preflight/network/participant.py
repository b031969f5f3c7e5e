"""A network check on one node: take part, or coordinate and take part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from opsd import __version__
from opsd.preflight.network.coordinator import Coordinator
from opsd.preflight.network.forkserver import ForkServer
from opsd.preflight.network.member import connect, serve
from opsd.preflight.network.rendezvous import Place
from opsd.preflight.network.spec import Joined

_FINISH_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Participant:
    """This node's ``place``, the number of ``processes`` that it can have, and the ``backend`` for them."""

    place: Place
    processes: int = 1
    backend: str = "gloo"
    join_s: float = 120.0


def take_part(participant: Participant) -> None:
    """Follow the coordinator until it says stop. Raises RuntimeError if it cannot be reached or dies."""
    with ForkServer() as forkserver:
        _join(participant, forkserver, lambda: False)


@contextmanager
def leading(participant: Participant, deadline_s: float) -> Iterator[Coordinator]:
    """Coordinate from this node, which also takes part; at the end all nodes are told to stop.

    A test may take ``deadline_s``. Raises RuntimeError if the port is taken.
    """
    here = participant.place
    with ForkServer() as forkserver:
        store = connect(here.host, here.port, serve=True, seconds=participant.join_s)
        coordinator = Coordinator(store, len(here.names), backend=participant.backend, deadline_s=deadline_s)
        over = threading.Event()
        member = threading.Thread(target=_join, args=(participant, forkserver, over.is_set), daemon=True)
        member.start()
        try:
            yield coordinator
        finally:
            coordinator.stop()
            over.set()
            member.join(timeout=_FINISH_S)


def _join(participant: Participant, forkserver: ForkServer, stopped: Callable[[], bool]) -> None:
    here = participant.place
    store = connect(here.host, here.port, serve=False, seconds=participant.join_s)
    me = Joined(here.node, here.names[here.node], participant.processes, __version__, participant.backend)
    serve(store, me, forkserver, (here.host, here.port), stopped)
