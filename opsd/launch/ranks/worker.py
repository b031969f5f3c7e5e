"""Runs in the rank's process: waits for its orders, then runs the user's program as the real ``__main__``.

Started by path with the interpreter of the ranks (``python -u worker.py DESCRIPTOR``), so it needs nothing but the
standard library, not even opsd. The descriptor is a socket; messages are JSON with a length in front:

``{"do": "import", "modules": {name: [names imported from it]}, "path": sys.path[0]}`` -> ``{"ready": bool}``
    become a warm standby; if an import fails, begin anew as a cold one;
``{"do": "run", "kind", "name", "args", "path", "env"}`` with the descriptors of stdout and stderr attached
    become the rank. ``kind`` is script, module or executable. A program that ends with an exception answers
    ``{"failed": true}`` at once: the interpreter's own end may take seconds from there.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import socket
import sys
import sysconfig
import time
import traceback
import types
from typing import Any, NoReturn

STACK_SIGNAL = signal.SIGRTMIN + 8
NOT_FOUND = 127
_PR_SET_PDEATHSIG, _PR_SET_PTRACER = 1, 0x59616D61
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def main() -> None:
    """Serve the launcher until it says what to run, or is gone."""
    launcher = os.getppid()
    _tie_to(launcher)
    channel = socket.socket(fileno=int(sys.argv[1]))
    while True:
        order, descriptors = _receive(channel)
        if order is None:
            return None
        if order["do"] == "import":
            _warm_up(channel, order)
            continue
        for stream, descriptor in zip((1, 2), descriptors, strict=True):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        os.environ.update(order["env"])
        return _run(order, channel)


def _tie_to(launcher: int) -> None:
    """Die with the launcher, and let it (with what it starts) take stacks where Yama restricts ptrace."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_PTRACER, launcher, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)


def _receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(channel, 4, 2)
    if not head:
        return None, []
    payload = b""
    size = int.from_bytes(head, "little")
    while len(payload) < size:
        part = channel.recv(size - len(payload))
        if not part:
            return None, []
        payload += part
    return json.loads(payload), descriptors


def _warm_up(channel: socket.socket, order: dict[str, Any]) -> None:
    """Import what the program will import; a module that is not there is the program's business, not ours.

    The launcher may need this process as a rank before it is done, and has then sent the next order already.
    """
    _set_path(order)
    try:
        for name, names in order["modules"].items():
            with contextlib.suppress(ModuleNotFoundError):
                __import__(name, fromlist=names)
    except Exception:
        traceback.print_exc()
        _answer(channel, ready=False)
        os.set_inheritable(channel.fileno(), True)
        os.execv(sys.executable, [sys.executable, "-u", __file__, str(channel.fileno())])  # noqa: S606
    # What has been imported stays: collections of garbage that looked at it would take a tenth of a second each.
    gc.freeze()
    _answer(channel, ready=True)


def _set_path(order: dict[str, Any]) -> None:
    """Put the program's folder where Python put ours; with PYTHONSAFEPATH it puts none."""
    if not sys.flags.safe_path:
        sys.path[0] = order["path"]


def _answer(channel: socket.socket, **message: bool) -> None:
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n")


def _run(order: dict[str, Any], channel: socket.socket) -> None:
    kind, name, args = order["kind"], order["name"], order["args"]
    if kind == "executable":
        _execute(name, args)
    _guard_stop_signals()
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    _set_path(order)
    try:
        module, code = _load_script(name) if kind == "script" else _load_module(name)
        sys.argv = [str(module.__file__), *args]
        sys.modules["_opsd_worker"] = sys.modules["__main__"]
        sys.modules["__main__"] = module
        exec(code, module.__dict__)  # noqa: S102  # running the user's program is what a launcher is for
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        _write_error(error, frames)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        _answer(channel, failed=True)
        sys.exit(1)


def _execute(name: str, args: list[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(name, [name, *args])  # noqa: S606  # no shell is what we want
    except OSError as error:
        _refuse(f"{name} cannot be executed: {error.strerror}")


def _guard_stop_signals() -> None:
    """Survive a SIGTERM or SIGUSR1 that was sent to the whole job, if this rank can be asked to stop through its page.

    A rank without a page dies of it as usual. The program's own handlers replace this one.
    """

    def guard(number: int, frame: types.FrameType | None) -> None:
        page = os.environ.get("OPSD_RANK_PAGE")
        if page is None or not os.path.exists(page):  # noqa: PTH110  # keep pathlib out of the signal handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _STOP_SIGNALS:
        signal.signal(number, guard)


def _load_script(path: str) -> tuple[types.ModuleType, types.CodeType]:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module = _main_module(path, loader, None)
    try:
        source = loader.get_data(path)
    except OSError as error:
        _refuse(f"{path} cannot be read: {error.strerror}")
    return module, compile(source, path, "exec", dont_inherit=True)


def _load_module(name: str) -> tuple[types.ModuleType, types.CodeType]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.__main__.".startswith(f"{error.name}."):
            raise
        spec = None
    loader: Any = spec.loader if spec is not None else None
    if spec is None or spec.origin is None or not hasattr(loader, "get_code"):
        _refuse(f"there is no module {name} that can be run")
    return _main_module(spec.origin, loader, spec), loader.get_code(spec.name)


def _main_module(path: str, loader: object, spec: importlib.machinery.ModuleSpec | None) -> types.ModuleType:
    module = types.ModuleType("__main__")
    vars(module).update(
        __file__=path,
        __loader__=loader,
        __spec__=spec,
        __package__=spec.parent if spec else None,
        __cached__=spec.cached if spec else None,
        __builtins__=builtins,
    )
    return module


def _refuse(message: str) -> NoReturn:
    _write_file({"type": "ProgramNotFound", "message": message, "where": "", "traceback": ""})
    print(f"opsd launch: {message}", file=sys.stderr)
    sys.exit(NOT_FOUND)


def _write_error(error: BaseException, frames: types.TracebackType | None) -> None:
    stack = traceback.extract_tb(frames)
    libraries = tuple(sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib"))
    own = [frame for frame in stack if not frame.filename.startswith(("<", *libraries))] or list(stack)
    _write_file(
        {
            "type": type(error).__name__,
            "message": str(error)[:2000],
            "where": f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else "",
            "traceback": "".join(traceback.format_exception(type(error), error, frames))[-20_000:],
        }
    )


def _write_file(error: dict[str, str]) -> None:
    """Leave the error where the launcher looks, in the form of ``torch.distributed.elastic``'s ``@record``."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": error["traceback"], "timestamp": str(int(time.time())), "at": time.time()}
    extra |= {key: error[key] for key in ("type", "where")}
    message = {"message": {"message": f"{error['type']}: {error['message']}", "extraInfo": extra}}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(message, file)


if __name__ == "__main__":
    main()
