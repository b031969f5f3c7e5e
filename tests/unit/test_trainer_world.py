"""How ranks find each other."""

from __future__ import annotations

import socket
import threading
import time

from opsd.trainer.world import await_store


def test_a_rank_waits_for_the_first_to_listen() -> None:
    """And goes on as soon as it does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        threading.Timer(0.3, listener.listen).start()
        began = time.monotonic()
        await_store(*listener.getsockname(), 60.0)
        assert 0.2 < time.monotonic() - began < 30.0


def test_it_does_not_wait_for_ever() -> None:
    """What then is wrong torch says."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        await_store(*silent.getsockname(), 0.1)
