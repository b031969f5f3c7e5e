"""Runs in the rank's process: waits for its orders, then runs the user's program as the real ``__main__``.

Started by path with the ranks' interpreter (``python -u worker.py DESCRIPTOR PROGRAM …``), so it uses the standard
library only, not even opsd. It has the whole environment of its rank from the start, and the program's name and
arguments for process listings. The descriptor is a socket; messages are JSON with a length prefix. Each has the
program: ``kind`` (script, module or executable), ``name``, ``argv0``, ``args``, ``path`` (its ``sys.path[0]``),
``observe`` (whether hooks are to write its rank page, see ``opsd/launch/observe``), and

``{"do": "import", "extra": [modules], "watch": [variables]}`` -> ``{"ready": bool, "read": [variables]}``
    become a warm standby; ``read`` are the watched variables that an import has read. If an import fails, restart as
    a cold worker;
``{"do": "run", "changes": {variable: value or null}}`` with the descriptors of stdout and stderr attached
    become the rank. If an import has read what changes now, or the program was edited, restart and run. A program that
    ends with an exception answers ``{"failed": true}`` at once: the interpreter's shutdown may take seconds. One that
    uses torch.distributed answers ``{"records": true}``; it then takes
``{"do": "dump", "path": file}``
    write torch's flight recorder to the file, if the interpreter lock can be had.
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
import select
import signal
import socket
import sys
import sysconfig
import time
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

STACK_SIGNAL = signal.SIGRTMIN + 8
NOT_FOUND = 127
_PR_SET_PDEATHSIG, _PR_SET_PTRACER = 1, 0x59616D61
_OF_THE_CHANNEL = 1
_OBSERVE = "_opsd_observe"
_OBSERVING = Path(__file__).parents[1] / "observe"
_ADAPTERS = Path(__file__).parents[2] / "adapters"
Order = dict[str, Any]


def main() -> None:
    """Serve the launcher until it says what to run, or is gone."""
    descriptor, _, waiting = sys.argv[_OF_THE_CHANNEL].partition(":")
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)
    _tie_to(os.getppid(), channel)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that runs the launcher in the background ignores it; the launcher passes it on all the same.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if waiting:
        with open(int(waiting), encoding="utf-8") as file:
            return _run(json.load(file), channel)
    standby: _Standby | None = None
    while True:
        order, descriptors = _receive(channel)
        if order is None:
            return None
        if order["do"] == "import":
            standby = _Standby(channel)
            standby.warm_up(order)
            continue
        if standby is not None:
            standby.become_rank(order, descriptors)
        else:
            _write_to(descriptors)
            _change(order["changes"])
        return _run(order, channel)


class _Standby:
    """This process before it becomes a rank."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._given = dict(os.environ)
        self._prelude = _sibling("imports").ImportPrelude()
        self._reads: Any = None

    def warm_up(self, order: Order) -> None:
        """Import what the program's top level imports, in the state that the program would have.

        The launcher may need this process as a rank before it is ready; its next order then waits in the channel.
        """
        _set_up(order)
        if order["observe"]:
            _hooks()
        script, module = (order["name"] if order["kind"] == kind else None for kind in ("script", "module"))
        self._reads = _sibling("env_reads").EnvironmentReads(order["watch"])
        stdin = _without_stdin()
        try:
            with self._reads:
                self._prelude.execute(script, module)
                for name in order["extra"]:
                    importlib.import_module(name)
        except Exception:
            traceback.print_exc()
            _answer(self._channel, ready=False)
            _take_stdin_back(stdin)
            _start_over(self._channel, self._given)
        _take_stdin_back(stdin)
        # What has been imported stays: collections of garbage that looked at it would take a tenth of a second each.
        gc.freeze()
        _answer(self._channel, ready=True, read=self._reads.names)

    def become_rank(self, order: Order, descriptors: list[int]) -> None:
        """Become the rank, in the same state as a new process, and print what the imports printed."""
        changes: dict[str, str | None] = order["changes"]
        if self._prelude.edited or not changes.keys().isdisjoint(self._reads.names):
            _write_to(descriptors)
            new = {name: value for name, value in (self._given | changes).items() if value is not None}
            _start_over(self._channel, new, order | {"changes": {}})
        said = os.pread(1, os.fstat(1).st_size, 0)
        _write_to(descriptors)
        with contextlib.suppress(OSError):
            os.write(2, said)
        _change(changes)


def _change(environment: dict[str, str | None]) -> None:
    """Apply the changes of the environment since this process was started."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _sibling(name: str) -> Any:
    """The module in a file beside this one, loaded without an entry in ``sys.modules``."""
    return _load(name, Path(__file__).with_name(f"{name}.py"))


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"_opsd_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _hooks() -> Any:
    """What reports for the program from its calls of torch; made once, before torch is imported."""
    if _OBSERVE not in sys.modules:
        package = _OBSERVING / "__init__.py"
        spec = importlib.util.spec_from_file_location(_OBSERVE, package, submodule_search_locations=[str(_OBSERVING)])
        assert spec is not None and spec.loader is not None
        sys.modules[_OBSERVE] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        vars(module)["observer"] = module.install(_load("client", _OBSERVING.parents[1] / "client.py"))
    return sys.modules[_OBSERVE].observer


def _without_stdin() -> int | None:
    """Leave stdin to the running rank; returns a duplicate of it, None if there is none."""
    try:
        stdin = os.dup(0)
    except OSError:
        return None
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return stdin


def _take_stdin_back(stdin: int | None) -> None:
    if stdin is not None:
        os.dup2(stdin, 0)
        os.close(stdin)


def _write_to(descriptors: list[int]) -> None:
    """Make the descriptors stdout and stderr; a single one becomes both."""
    for number, descriptor in zip((1, 2), (descriptors * 2)[:2], strict=True):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)


def _start_over(channel: socket.socket, env: dict[str, str], order: Order | None = None) -> NoReturn:
    """Restart as a cold worker in the environment ``env``, which executes ``order`` at once if there is one."""
    descriptors = str(channel.fileno())
    channel.set_inheritable(True)
    if order is not None:
        waiting = os.memfd_create("order", 0)
        os.write(waiting, json.dumps(order).encode())
        os.lseek(waiting, 0, os.SEEK_SET)
        descriptors += f":{waiting}"
    os.execve(sys.executable, [sys.executable, "-u", __file__, descriptors, *sys.argv[2:]], env)  # noqa: S606


def _tie_to(launcher: int, channel: socket.socket) -> None:
    """Die with the launcher, and let it and its children take stacks where Yama restricts ptrace.

    If the launcher died before this process began, it is not the parent and its end of the channel is closed; orders
    left in the channel must not be executed then.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_PTRACER, launcher, 0, 0, 0)
    closed = select.poll()
    closed.register(channel, select.POLLRDHUP)
    if os.getppid() != launcher or closed.poll(0):
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


def _set_up(order: Order) -> None:
    """Make ``sys`` and ``__main__`` look as they do when the program runs, its code excepted."""
    if not sys.flags.safe_path:
        sys.path[0] = order["path"]  # where Python put our folder; with PYTHONSAFEPATH it puts none
    sys.argv = [order["argv0"], *order["args"]]
    what = ["-m", order["name"]] if order["kind"] == "module" else [order["argv0"]]
    sys.orig_argv[:] = [sys.orig_argv[0], "-u", *what, *order["args"]]
    if "_opsd_worker" not in sys.modules:
        sys.modules["_opsd_worker"] = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
    if order["kind"] == "script":
        _describe_main(order["name"], importlib.machinery.SourceFileLoader("__main__", order["name"]), None)


def _answer(channel: socket.socket, **message: object) -> None:
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n")


def _run(order: Order, channel: socket.socket) -> None:
    kind, name, args = order["kind"], order["name"], order["args"]
    if kind == "executable":
        _execute(name, args)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(STACK_SIGNAL))
    _set_up(order)
    hooks = _hooks() if order["observe"] else None
    if hooks is not None:
        hooks.begin()
    _sibling("dumps").serve(channel)
    try:
        code = _load_script(name) if kind == "script" else _load_module(name)
        exec(code, sys.modules["__main__"].__dict__)  # noqa: S102  # running the user's program is what a launcher is for
        if hooks is not None:
            hooks.finish()
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        _report(error)
        sys.excepthook = lambda *_: None  # it has been reported; Python ends the process by SIGINT from here
        raise
    except BaseException as error:
        _write_error(error, _report(error))
        _answer(channel, failed=True)
        sys.exit(1)


def _report(error: BaseException) -> types.TracebackType | None:
    """Print the error as Python would, without the frames of this file and of hooks; returns the remaining frames."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames):
        frames = frames.tb_next
    frame = frames
    while frame is not None:
        while frame.tb_next is not None and _is_ours(frame.tb_next):
            frame.tb_next = frame.tb_next.tb_next
        frame = frame.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)
    return frames


def _is_ours(frame: types.TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith((__file__, f"{_OBSERVING}/", f"{_ADAPTERS}/"))


def _execute(name: str, args: list[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(name, [name, *args])  # noqa: S606  # no shell is what we want
    except OSError as error:
        _refuse(f"{name} cannot be executed: {error.strerror}")


def _load_script(path: str) -> types.CodeType:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    _describe_main(path, loader, None)
    try:
        source = loader.get_data(path)
    except OSError as error:
        _refuse(f"{path} cannot be read: {error.strerror}")
    return compile(source, path, "exec", dont_inherit=True)


def _load_module(name: str) -> types.CodeType:
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
    _describe_main(spec.origin, loader, spec)
    sys.argv[0] = spec.origin
    code: types.CodeType = loader.get_code(spec.name)
    return code


def _describe_main(path: str, loader: object, spec: importlib.machinery.ModuleSpec | None) -> None:
    vars(sys.modules["__main__"]).update(
        __file__=path,
        __loader__=loader,
        __spec__=spec,
        __package__=spec.parent if spec else None,
        __cached__=spec.cached if spec else None,
        __builtins__=builtins,
    )


def _refuse(message: str) -> NoReturn:
    _write_file({"type": "ProgramNotFound", "message": message, "where": "", "traceback": ""})
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
    """Write the error file in the format of ``torch.distributed.elastic``'s ``@record``."""
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
