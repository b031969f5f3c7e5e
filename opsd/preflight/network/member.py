"""One node of a network check: joins, runs its orders in forked processes, returns the results."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from queue import Empty, Queue
from typing import TYPE_CHECKING, Final

from pydantic import TypeAdapter

from opsd import __version__
from opsd.preflight.network.coordinator import Coordinator, Done, Joined, Spec
from opsd.preflight.network.measure import ForkServer
from opsd.preflight.network.rendezvous import Place
from opsd.threads import start_thread

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

POLL: Final = timedelta(seconds=1)
_AGAIN_S: Final = 0.2
_HANDSHAKE_S: Final = 5.0
"""For the greetings of a store that has just answered; torch tries three times."""
PATIENCE_S: Final = 3600.0
"""How long a node waits for its next order; the lost connection shows at once that the coordinator has died."""


def connect(host: str, port: int, *, serve: bool, seconds: float) -> TCPStore:
    """The store of the check; ``serve`` on node 0. Raises RuntimeError if it is not reachable within ``seconds``.

    Whoever joins waits here until somebody answers: torch's client waits four times as long as it is told to, and
    prints its stack for each try.
    """
    from torch.distributed import TCPStore as Store  # type: ignore[attr-defined]

    if serve:
        return Store(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    _wait_for(host, port, seconds)
    greeted: Queue[TCPStore | RuntimeError] = Queue()

    def greet() -> None:
        try:
            greeted.put(Store(host, port, is_master=False, timeout=timedelta(seconds=min(seconds, _HANDSHAKE_S))))
        except RuntimeError as error:
            greeted.put(error)

    start_thread("greet", greet)  # torch waits for ever for somebody who accepts connections and says nothing
    try:
        store = greeted.get(timeout=seconds + _HANDSHAKE_S)
    except Empty:
        raise RuntimeError("what answers there is no network check: name another port with --rendezvous") from None
    if isinstance(store, RuntimeError):
        raise store
    store.set_timeout(timedelta(seconds=seconds))
    return store


def _wait_for(host: str, port: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))):
                return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"nobody answers after {seconds:g} s ({error.strerror or error}): start the same command on the "
                    "first node, and see that no firewall is between"
                ) from error
        time.sleep(_AGAIN_S)


def serve(
    store: TCPStore, me: Joined, forkserver: ForkServer, address: tuple[str, int], stopped: Callable[[], bool]
) -> None:
    """Take part until the coordinator or ``stopped`` says stop. Raises RuntimeError if the coordinator is gone."""
    store.set(f"join/{me.node}", TypeAdapter(Joined).dump_json(me).decode())
    for number in count():
        text = _next_order(store, f"order/{me.node}/{number}", stopped)
        if text is None:
            return
        order = json.loads(text)
        spec = TypeAdapter(Spec).validate_python(order)
        done = forkserver.run(
            {
                "spec": order,
                "node": me.node,
                "rank": spec.members.index(me.node),
                "local": spec.processes,
                "store": address,
            }
        )
        store.set(f"done/{spec.test}/{me.node}", TypeAdapter(Done).dump_json(done).decode())


def _next_order(store: TCPStore, key: str, stopped: Callable[[], bool]) -> str | None:
    """The next order, None if there are no more."""
    from torch.distributed import DistStoreError

    waited = 0.0
    while not stopped() and waited < PATIENCE_S:
        try:
            store.wait([key], POLL)
        except DistStoreError:  # nothing yet
            waited += POLL.total_seconds()
            continue
        text: str = store.get(key).decode()
        return None if text == "stop" else text
    return None


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
