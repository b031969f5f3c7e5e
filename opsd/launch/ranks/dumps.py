"""Runs in the rank's process: writes torch's flight recorder to a file when the launcher asks on the worker's channel.

A thread waits for that, started once the program imports ``torch.distributed``; programs without torch have none. It
needs the interpreter lock to answer. A rank that does not give that up is asked through a socket instead, on which a
server of torch itself answers, ``torch.distributed``'s control plane (torch 2.4 and newer): its threads are native.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import importlib
import json
import os
import socket
import sys
from collections.abc import MutableMapping
from typing import Any

_PACKAGE = "torch.distributed"
_CALLS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Torch's calls, which return JSON: NCCL has a recorder of its own, all other backends share one."""


_OLDER_NAMES = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", (2, 8)),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", (2, 10)),
)
"""The recorder's variables, their older names, and the release from which on the older ones are not needed. Which one
brought the second is not certain; a later one does no harm, because torch warns of it only when it dumps."""
_ERRORS_ONLY = 2
"""Torch's log level."""


def socket_of(page: str) -> str:
    """The socket that gives the recorder of the rank with this page without the interpreter lock."""
    return f"{os.path.splitext(page)[0]}.torch"  # noqa: PTH122


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
    fit_environment(os.environ, getattr(sys.modules.get("torch.version"), "__version__", ""))
    try:
        # Not of ``threading``: the program counts its own threads.
        _thread.start_new_thread(_answer, (channel,))
    except RuntimeError:
        return


def fit_environment(environ: MutableMapping[str, str], version: str) -> None:
    """Name the recorder's variables as this ``version`` of torch does."""
    release = _release(version)
    for name, older, since in _OLDER_NAMES:
        if release < since and name in environ:
            environ.setdefault(older, environ[name])


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number; the newest release for what is no version."""
    numbers = version.split(".")[:2]
    return tuple(map(int, numbers)) if len(numbers) == 2 and all(map(str.isdecimal, numbers)) else (sys.maxsize,)


def _start_server() -> None:
    """Have torch listen on the socket, from when the program has imported torch.distributed; no rank alone needs it.

    The server says so in the log, which is kept from it. It is never freed: torch would say that as well.
    """
    path = socket_of(os.environ.get("OPSD_RANK_PAGE", ""))
    if os.environ.get("WORLD_SIZE", "1") == "1" or not os.path.isdir(os.path.dirname(path)):  # noqa: PTH112, PTH120
        return
    importlib.import_module(_PACKAGE)
    make = sys.modules["torch._C._distributed_c10d"]._WorkerServer
    folder = os.path.dirname(sys.modules["torch"].__file__ or "")  # noqa: PTH120
    native = ctypes.CDLL(f"{folder}/lib/libc10.so")
    level = ctypes.c_int.in_dll(native, "FLAGS_caffe2_log_level")
    before, level.value = level.value, max(level.value, _ERRORS_ONLY)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        server = make(path, -1)
    finally:
        level.value = before
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    os.chmod(path, 0o600)  # noqa: PTH101


def _answer(channel: socket.socket) -> None:
    try:
        channel.sendall(b'{"records": true}\n')
        with contextlib.suppress(Exception):  # an older torch, or one that is built in another way
            _start_server()
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
