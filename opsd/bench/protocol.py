"""``opsd bench protocol``: the launchers' protocol at the size of a large run, in virtual time."""

from __future__ import annotations

from importlib import import_module
from typing import Any

NODES = 1024


def run(nodes: int = NODES) -> dict[str, Any]:
    """The start of ``nodes`` launchers with ranks, quiet, and the loss of a node, of a spare and of the leader."""
    figures: dict[str, Any] = import_module("tests.fakes.protocol").run(nodes)
    return figures
