"""Keeps torch.compile away from the hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType


def keep_from_compiler(modules: Iterable[ModuleType]) -> None:
    """Have torch run the functions of ``modules`` as they are.

    After a graph break torch compiles what a function calls, hooks as well: that takes time, and their counters would
    make it compile them again and again.
    """
    skip = _skip()
    for module in modules:
        for code in _codes(vars(module).values(), module.__name__):
            skip(code)


def _skip() -> Callable[[CodeType], None]:
    """The same as ``torch._dynamo.eval_frame.skip_code``, whose import takes seconds."""
    native = sys.modules["torch"]._C._dynamo.eval_frame
    if hasattr(native, "skip_code"):  # until torch 2.6
        skip: Callable[[CodeType], None] = native.skip_code
        return skip
    as_it_is = native._FrameExecStrategy(native._FrameAction.SKIP, native._FrameAction.DEFAULT)
    return lambda code: native.set_code_exec_strategy(code, as_it_is)


def _codes(values: Iterable[object], module: str) -> Iterator[CodeType]:
    """The code of all functions of a module, those within others as well."""
    for value in values:
        if isinstance(value, type) and value.__module__ == module:
            yield from _codes(vars(value).values(), module)
        elif isinstance(value, FunctionType) and value.__module__ == module:
            yield from _nested(value.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
