"""How ranks find each other."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from opsd.trainer.config import ConfigError, load
from opsd.trainer.parallel import demand_device
from opsd.trainer.world import await_store, gpu_here


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


@pytest.mark.parametrize(
    ("settings", "gpu", "expected"),
    [
        (["model.attention=flex"], None, "model.attention flex needs a GPU, and this run is on the CPU"),
        (["model.attention=varlen", "model.dtype=bfloat16"], None, "model.attention varlen needs a GPU"),
        (
            ["model.attention=varlen", "model.dtype=bfloat16"],
            (7, 5),
            "8.0 or more, this one has 7.5",
        ),
        (["parallel.fp8=true"], (8, 0), "parallel.fp8 needs a GPU of compute capability 8.9 or more, this one has 8.0"),
        (["parallel.fp8=true"], None, ""),
        (["parallel.fp8=true", "model.attention=flex"], (9, 0), ""),
        ([], None, ""),
    ],
)
def test_kernels_that_a_device_has_not(settings: list[str], gpu: tuple[int, int] | None, expected: str) -> None:
    """They are refused by the name of the setting before the ranks meet."""
    config = load("tiny", ["data.shards=/data", *settings], {})
    if not expected:
        demand_device(config, gpu)
        return
    with pytest.raises(ConfigError, match=expected):
        demand_device(config, gpu)


def test_the_device_is_that_of_the_rank() -> None:
    """Each rank asks for its own GPU, and none that is to be on the CPU does."""
    cuda: Any = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda device: (9, device))
    run = load("tiny", ["data.shards=/data"], {}).run
    assert gpu_here(run.model_copy(update={"device": "auto"}), {"LOCAL_RANK": "3"}, cuda) == (9, 3)
    assert gpu_here(run.model_copy(update={"device": "cpu"}), {}, cuda) is None
