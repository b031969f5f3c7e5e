"""Who takes part in a generation, and where its ranks meet."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assignment:
    """This node's place in one generation; ranks ``rank_offset`` to ``rank_offset + local_size - 1`` are its own."""

    node_rank: int
    nodes: int
    rank_offset: int
    local_size: int
    world_size: int
    master_addr: str
    master_port: int


def free_port(first: int = 20_000, last: int = 30_000) -> int:
    """A TCP port nobody listens on, below the range from which the kernel gives out ports for connections.

    (A port from that range could be taken between our look and the rank's bind.) Raises OSError if there is none.
    """
    for port in random.sample(range(first, last), k=last - first):
        with socket.socket(socket.AF_INET) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free TCP port between {first} and {last}")
