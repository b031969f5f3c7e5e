"""Lets a rank's program run unchanged on gloo; with ``NO_GPU`` also one that asks for CUDA and NCCL.

On the PYTHONPATH of a test's ranks; Python imports it when it starts. What the program sees is patched once it has
imported torch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, NoReturn


def _on_the_cpu(place: Any) -> Any:
    return "cpu" if type(place) is int or str(place).startswith("cuda") else place


def _moves(move: Any) -> Any:
    def to(self: Any, *places: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = _on_the_cpu(options["device"])
        return move(self, *(_on_the_cpu(place) for place in places), **options)

    return to


def _pretend(torch: Any) -> None:
    torch.cuda.set_device = lambda *_: None
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.to, torch.nn.Module.to = _moves(torch.Tensor.to), _moves(torch.nn.Module.to)
    begin, load = torch.distributed.init_process_group, torch.load
    torch.distributed.init_process_group = lambda *_, **options: begin("gloo")
    torch.load = lambda *args, **options: load(*args, **{**options, "map_location": "cpu"})
    parallel = torch.nn.parallel.DistributedDataParallel
    build = parallel.__init__

    def on_the_cpu(self: Any, module: Any, device_ids: Any = None, **options: Any) -> None:
        build(self, module, **options)

    parallel.__init__ = on_the_cpu


def _keep(torch: Any) -> None:
    """Keep what wraps a model, and with it the process group, beyond the end of the interpreter.

    With torch 2.13, ``~ProcessGroupGloo`` joins a thread of its own, which may wait for the GIL that the caller holds:
    a program that drops its model after the last collective, or at its exit, hangs for good, under torchrun in one of
    six runs.
    """
    parallel = torch.nn.parallel.DistributedDataParallel
    build = parallel.__init__

    def build_and_keep(self: Any, *args: Any, **options: Any) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        build(self, *args, **options)

    parallel.__init__ = build_and_keep


def _end_at_once() -> None:
    """End the process after all that programs have registered for its exit, without what Python does then.

    With torch 2.13 destructors that run later take the GIL of an interpreter that is gone: the main thread then ends
    alone, and the process stays for good.
    """
    codes = [0]
    leave = sys.exit

    def note(code: Any = None) -> NoReturn:
        codes.append(code if isinstance(code, int) else int(code is not None))
        leave(code)

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(codes[-1] or hasattr(sys, "last_value"))  # which an exception that nothing caught leaves behind

    sys.exit = note
    atexit.register(end)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch as the others do, and has it patched after its import; who finds it need not import it."""

    busy = False

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or self.busy:
            return None
        self.busy = True
        spec = importlib.util.find_spec(name)
        self.busy = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _keep(module)
                if "NO_GPU" in os.environ:
                    _pretend(module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


if "RANK" in os.environ:
    _end_at_once()
    sys.meta_path.insert(0, _Finder())
