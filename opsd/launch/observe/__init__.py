"""Writes the rank page of a program that reports nothing itself, from what every torch program calls.

Runs in the rank's process and is loaded by path (``worker.py``) as the package ``_opsd_observe``: standard library and
``opsd/client.py`` only, imports within it are relative, and torch is never imported by it.

============== =======================================================================================
page           known from
============== =======================================================================================
step           the optimizer's step; several optimizers, skipped steps and accumulation: ``steps.py``;
               without one that torch knows, writes to the parameters between backward passes: ``updates.py``
data           iteration of a DataLoader
forward        all else in training before a step: a forward pass cannot be told from other code
backward       ``torch.autograd.backward``, which ``Tensor.backward`` calls
optimizer      the optimizer's step
collective     calls of ``torch.distributed``; those that native code starts belong to their phase
evaluation     no gradients while a module is in evaluation mode
checkpoint     ``torch.save``, safetensors, ``torch.distributed.checkpoint``
step's number  counted on from the checkpoint that was loaded: ``resume.py``
committed step a save of about the size of the model has returned
learning rate  the optimizer's first group
place          device meshes and groups with names: ``layout.py``
============== =======================================================================================

Tokens, loss and gradient norm are not known: to read a loss would wait for the GPU, and its scale is the program's own.
A page of the program's own (``opsd.client``, an adapter) replaces this one. Trainers of Hugging Face and TRL get their
adapter by themselves (``attach.py``).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from types import ModuleType

from .attach import attach
from .compiler import keep_from_compiler
from .imports import Imported, when_imported
from .observer import Observer
from .torch_hooks import INSTALLERS


def install(client: ModuleType) -> Observer:
    """Watch the imports of this process; nothing is reported before ``Observer.begin``. ``client``: opsd.client."""
    observer = Observer(client)
    os.register_at_fork(after_in_child=observer.end)
    own = [client, *(module for name, module in sys.modules.items() if name.startswith(f"{__name__}."))]
    hooks: dict[str, Imported] = {name: partial(put, observer) for name, put in INSTALLERS.items()}
    when_imported("torch", {"torch": lambda _: keep_from_compiler(own), **hooks})
    when_imported("transformers.trainer", {"transformers.trainer": attach})
    return observer
