"""Runs in the rank's process: writes torch's flight recorder to a file when the launcher asks on the worker's channel.

A thread waits for that, started once the program imports ``torch.distributed``; programs without torch have none. It
needs the interpreter lock to answer, so a rank that never gives it up leaves no dump.
"""

from __future__ import annotations

import _thread
import json
import os
import socket
import sys
from typing import Any

_PACKAGE = "torch.distributed"
_CALLS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Torch's calls, which return JSON: NCCL has a recorder of its own, all other backends share one."""


def serve(channel: socket.socket) -> None:
    """Answer on ``channel`` from when the program uses torch.distributed."""
    if _PACKAGE in sys.modules:
        _start(channel)
    else:
        sys.meta_path.insert(0, _ImportWatch(channel))


class _ImportWatch:
    """Finds no module; sees the program import the package."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Called by the import system for each module that is not loaded."""
        if name == _PACKAGE and self in sys.meta_path:
            sys.meta_path.remove(self)
            _start(self._channel)


def _start(channel: socket.socket) -> None:
    try:
        # Not of ``threading``: the program counts its own threads.
        _thread.start_new_thread(_answer, (channel,))
    except RuntimeError:
        return


def _answer(channel: socket.socket) -> None:
    try:
        channel.sendall(b'{"records": true}\n')
        while size := int.from_bytes(_receive(channel, 4), "little"):
            order: dict[str, Any] = json.loads(_receive(channel, size))
            if order.get("do") == "dump":
                _dump(order["path"])
    except (OSError, ValueError):
        return


def _receive(channel: socket.socket, size: int) -> bytes:
    """So many bytes, nothing once the launcher is gone."""
    received = b""
    while len(received) < size:
        part = channel.recv(size - len(received))
        if not part:
            return b""
        received += part
    return received


def _dump(path: str) -> None:
    """Write what the recorder holds to ``path``; nothing if there is none."""
    module = sys.modules.get("torch._C._distributed_c10d")
    for name in _CALLS:
        call = getattr(module, name, None)
        content = call(True, False) if call is not None else b""
        if isinstance(content, str):
            content = content.encode()
        if b'"record_id"' in content:
            break
    else:
        return
    with open(f"{path}.part", "wb") as file:
        file.write(content)
    os.replace(f"{path}.part", path)  # noqa: PTH105  # in the rank, with nothing imported for it
