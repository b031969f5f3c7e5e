"""One node of a network check: joins, runs its orders in forked processes, returns the results."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Final

from pydantic import TypeAdapter

from opsd.preflight.network.forkserver import ForkServer
from opsd.preflight.network.spec import Done, Joined, Spec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

POLL: Final = timedelta(seconds=1)
PATIENCE_S: Final = 3600.0
"""How long a node waits for its next order; the lost connection shows at once that the coordinator has died."""


def connect(host: str, port: int, *, serve: bool, seconds: float) -> TCPStore:
    """The store of the check; ``serve`` on node 0. Raises RuntimeError if it is not reachable within ``seconds``."""
    from torch.distributed import TCPStore as Store  # type: ignore[attr-defined]

    store: TCPStore = Store(host, port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    return store


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
