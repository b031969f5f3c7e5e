"""A network check from the point of view of one process: take part, or lead and take part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from opsd import __version__
from opsd.preflight.network.head import Head
from opsd.preflight.network.member import connect, serve
from opsd.preflight.network.rendezvous import Place
from opsd.preflight.network.spec import Joined
from opsd.preflight.network.zygote import Zygote

_FINISH_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Team:
    """This node's ``place``, with how many ``processes`` each node takes part, and over which ``backend``."""

    place: Place
    processes: int = 1
    backend: str = "gloo"
    join_s: float = 120.0


def take_part(team: Team) -> None:
    """Do what the head says until it says stop. Raises RuntimeError if it cannot be reached or dies."""
    with Zygote() as zygote:
        _join(team, zygote, lambda: False)


@contextmanager
def leading(team: Team, deadline_s: float) -> Iterator[Head]:
    """Lead from this node, which takes part as well; at the end everybody is sent home.

    A test may take ``deadline_s``. Raises RuntimeError if the port is taken.
    """
    here = team.place
    with Zygote() as zygote:
        store = connect(here.host, here.port, serve=True, seconds=team.join_s)
        head = Head(store, len(here.names), backend=team.backend, deadline_s=deadline_s)
        over = threading.Event()
        member = threading.Thread(target=_join, args=(team, zygote, over.is_set), daemon=True)
        member.start()
        try:
            yield head
        finally:
            head.stop()
            over.set()
            member.join(timeout=_FINISH_S)


def _join(team: Team, zygote: Zygote, stopped: Callable[[], bool]) -> None:
    here = team.place
    store = connect(here.host, here.port, serve=False, seconds=team.join_s)
    me = Joined(here.node, here.names[here.node], team.processes, __version__)
    serve(store, me, zygote, (here.host, here.port), stopped)
