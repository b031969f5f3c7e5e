"""The hooks in torch and safetensors: each tells the observer, then does what it did before.

A hook that a release of torch has no place for is left out. While torch.compile traces, hooks are not there: each asks
``torch.compiler.is_compiling`` first, which is a constant for the tracer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from .observer import Observer

Installer = Callable[[Observer, ModuleType], None]

COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "new_group", "recv", "recv_object_list",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
)  # fmt: skip


REPLACED: list[tuple[Any, str, Any, Any]] = []
"""What has been replaced: owner, name, original, hook."""


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in the place of ``owner.name``, if there is one."""
    original = vars(owner).get(name)
    if original is not None:
        hook = make(original)
        with contextlib.suppress(AttributeError, TypeError):
            setattr(owner, name, hook)
            REPLACED.append((owner, name, original, hook))


def _compiling() -> Callable[[], bool]:
    """``torch.compiler.is_compiling``, or what says no where torch has none."""
    compiler = getattr(sys.modules["torch"], "compiler", None)
    return getattr(compiler, "is_compiling", lambda: False)


def _during(observer: Observer, enter: Callable[[], None], leave: Callable[[], None]) -> Callable[[Any], Any]:
    """Makes functions tell the observer when they begin and end."""
    compiling, watches = _compiling(), observer.watches

    def make(function: Any) -> Any:
        @functools.wraps(function)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if compiling() or not watches():
                return function(*args, **kwargs)
            enter()
            try:
                return function(*args, **kwargs)
            finally:
                leave()

        return hooked

    return make


def hook_optimizers(observer: Observer, module: ModuleType) -> None:
    """``torch.optim.optimizer``: steps, by torch's own hooks for all optimizers."""
    compiling = _compiling()

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not compiling():
            closure = kwargs.get("closure") is not None or (len(args) > 1 and callable(args[1]))
            observer.begin_update(optimizer, id(optimizer), closure=closure)

    def after(optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not compiling():
            observer.end_update(optimizer, id(optimizer))

    def reads_state(load: Any) -> Any:
        @functools.wraps(load)
        def hooked(optimizer: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            result = load(optimizer, state_dict, *args, **kwargs)
            observer.loaded_optimizer(state_dict)
            return result

        return hooked

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)
    _replace(module.Optimizer, "load_state_dict", reads_state)


def hook_scaler(observer: Observer, module: ModuleType) -> None:
    """``torch.amp.grad_scaler``: a step that the scaler skips is a step of the program."""

    def make(step: Any) -> Any:
        @functools.wraps(step)
        def hooked(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            key = "scaler", id(optimizer)
            observer.begin_update(optimizer, key)
            try:
                return step(scaler, optimizer, *args, **kwargs)
            finally:
                observer.end_update(optimizer, key)

        return hooked

    _replace(module.GradScaler, "step", make)


def hook_data(observer: Observer, module: ModuleType) -> None:
    """``torch.utils.data.dataloader``: waiting for batches, and starting workers."""

    def wait() -> None:
        observer.keep_or_enter("data")

    _replace(module._BaseDataLoaderIter, "__next__", _during(observer, wait, observer.batch))
    _replace(module.DataLoader, "__iter__", _during(observer, wait, observer.leave))


def hook_autograd(observer: Observer, module: ModuleType) -> None:
    """``torch.autograd``: backward passes, and where gradients are off."""
    compiling, watches = _compiling(), observer.watches

    def passes(backward: Any) -> Any:
        @functools.wraps(backward)
        def hooked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or not watches():
                return backward(tensors, *args, **kwargs)
            observer.begin_backward(tensors)
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                observer.leave()

        return hooked

    _replace(module, "backward", passes)

    def telling(tell: Callable[[], None]) -> Callable[[Any], Any]:
        def make(function: Any) -> Any:
            @functools.wraps(function)
            def hooked(self: Any, *args: Any) -> Any:
                if not compiling() and watches():
                    tell()
                return function(self, *args)

            return hooked

        return make

    for kind in (module.grad_mode.no_grad, module.grad_mode.inference_mode):
        _replace(kind, "__enter__", telling(observer.no_gradients))
        _replace(kind, "__exit__", telling(observer.gradients))


def hook_modules(observer: Observer, module: ModuleType) -> None:
    """``torch.nn.modules.module``: training and evaluation mode, which ``eval`` sets by ``train``, for all parts."""
    compiling, watches = _compiling(), observer.watches
    within = False

    def make(train: Any) -> Any:
        @functools.wraps(train)
        def hooked(self: Any, mode: bool = True) -> Any:
            nonlocal within
            if compiling() or within or not watches():
                return train(self, mode)
            within = True
            try:
                return train(self, mode)
            finally:
                within = False
                observer.mode(training=bool(mode))

        return hooked

    _replace(module.Module, "train", make)


def hook_collectives(observer: Observer, module: ModuleType) -> None:
    """``torch.distributed.distributed_c10d``, whose functions ``torch.distributed`` has by the same names."""
    make = _during(observer, lambda: observer.keep_or_enter("collective"), observer.leave)
    for name in COLLECTIVES:
        _replace_everywhere(module, name, make, also=("torch.distributed",))

    def telling(new_group: Any) -> Any:
        @functools.wraps(new_group)
        def hooked(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            group = new_group(ranks, *args, **kwargs)
            with contextlib.suppress(Exception):
                observer.layout.group(kwargs.get("group_desc") or "", list(ranks or ()))
                observer.tell_place()
            return group

        return hooked

    _replace_everywhere(module, "new_group", telling, also=("torch.distributed",))


def hook_meshes(observer: Observer, module: ModuleType) -> None:
    """``torch.distributed.device_mesh``: the layout of the ranks, where the dimensions have names."""

    def make(init: Any) -> Any:
        @functools.wraps(init)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            mesh = init(*args, **kwargs)
            with contextlib.suppress(Exception):
                observer.layout.mesh(mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_coordinate())
                observer.tell_place()
            return mesh

        return hooked

    _replace_everywhere(module, "init_device_mesh", make, also=("torch.distributed",))


def _replace_everywhere(module: ModuleType, name: str, make: Callable[[Any], Any], *, also: tuple[str, ...]) -> None:
    """The same in modules that have taken the function over."""
    original = vars(module).get(name)
    _replace(module, name, make)
    for other in [sys.modules[other] for other in also if other in sys.modules]:
        if original is not None and vars(other).get(name) is original:
            _replace(other, name, lambda _: vars(module)[name])


Place = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
"""Where a function saves to or loads from, by its arguments."""


def _argument(index: int, name: str) -> Place:
    return lambda args, kwargs: args[index] if len(args) > index else kwargs.get(name)


def _folder(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Of torch.distributed.checkpoint."""
    storage = kwargs.get("storage_writer") or kwargs.get("storage_reader")
    return kwargs.get("checkpoint_id") or getattr(storage, "path", None)


def _saving(observer: Observer, place: Place, *, whole: bool = False) -> Callable[[Any], Any]:
    """Makes functions that save tell how much they save, and where."""

    def make(function: Any) -> Any:
        @functools.wraps(function)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            watched = observer.watches()
            if watched:
                observer.enter("checkpoint")
            try:
                result = function(*args, **kwargs)
                with contextlib.suppress(Exception):
                    to = place(args, kwargs)
                    observer.saved(None if whole else _size(to), _path(to), later=_future(result))
                return result
            finally:
                if watched:
                    observer.leave()

        return hooked

    return make


def _loading(observer: Observer, place: Place) -> Callable[[Any], Any]:
    def make(function: Any) -> Any:
        @functools.wraps(function)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                path = _path(place(args, kwargs))
                if path is not None:
                    observer.loaded(path)
            return function(*args, **kwargs)

        return hooked

    return make


def _path(place: Any) -> str | None:
    """The path of a file that is named, or open."""
    if not isinstance(place, str | os.PathLike):
        place = getattr(place, "name", None)
    return os.fspath(place) if isinstance(place, str | os.PathLike) and os.fspath(place) else None


def _size(place: Any) -> int:
    """The bytes in a file that was written."""
    return os.stat(place).st_size if isinstance(place, str | os.PathLike) else int(place.tell())  # noqa: PTH116


def _future(result: Any) -> Any:
    """What a save in the background returns, None for one that is done."""
    upload = getattr(result, "upload_completion", result)
    return upload if hasattr(upload, "add_done_callback") else None


def hook_torch_files(observer: Observer, module: ModuleType) -> None:
    """``torch.serialization``: ``torch.save`` and ``torch.load``."""
    _replace_everywhere(module, "save", _saving(observer, _argument(1, "f")), also=("torch",))
    _replace_everywhere(module, "load", _loading(observer, _argument(0, "f")), also=("torch",))


def hook_safetensors(observer: Observer, module: ModuleType) -> None:
    """``safetensors.torch``."""
    _replace(module, "save_file", _saving(observer, _argument(1, "filename")))
    _replace(module, "load_file", _loading(observer, _argument(0, "filename")))


def hook_distributed_saves(observer: Observer, module: ModuleType) -> None:
    """``torch.distributed.checkpoint.state_dict_saver``."""
    for name in ("save", "async_save"):
        _replace_everywhere(module, name, _saving(observer, _folder, whole=True), also=(_PACKAGE,))


def hook_distributed_loads(observer: Observer, module: ModuleType) -> None:
    """``torch.distributed.checkpoint.state_dict_loader``."""
    _replace_everywhere(module, "load", _loading(observer, _folder), also=(_PACKAGE,))


_PACKAGE = "torch.distributed.checkpoint"

INSTALLERS: dict[str, Installer] = {
    "torch.amp.grad_scaler": hook_scaler,
    "torch.autograd": hook_autograd,
    "torch.distributed.checkpoint.state_dict_loader": hook_distributed_loads,
    "torch.distributed.checkpoint.state_dict_saver": hook_distributed_saves,
    "torch.distributed.device_mesh": hook_meshes,
    "torch.distributed.distributed_c10d": hook_collectives,
    "torch.nn.modules.module": hook_modules,
    "torch.optim.optimizer": hook_optimizers,
    "torch.serialization": hook_torch_files,
    "torch.utils.data.dataloader": hook_data,
    "safetensors.torch": hook_safetensors,
}
