"""What observing costs a program: the same steps with and without the hooks, in turn, in one thread, in CPU time.

nanoGPT is measured where ``OPSD_OUTSIDE`` names a folder with a checkout of it (tests/outside/README.md), in the
configuration that its README has for machines without GPU, on one core.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import opsd.client
from opsd.launch.observe import install
from opsd.launch.observe.torch_hooks import REPLACED
from opsd.rank_page import read_page

Step = Callable[[], None]
TINY_PAIRS, NANOGPT_PAIRS, WARM = 2000, 400, 20
MICRO_BATCHES = 64
NANOGPT: dict[str, Any] = {
    "block_size": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "dropout": 0.0,
    "vocab_size": 65,
    "bias": False,
}
BATCH = 12


def run() -> dict[str, float | int]:
    """Medians of paired differences, each between a step with and the next without hooks, or the other way round.

    ``ours_us_per_step``: microseconds of a step with one backward pass and one optimizer, ``..._64`` with 64 passes.
    ``nanogpt_percent``: of nanoGPT's step, with the 95 % interval of the median; ``nanogpt_percent_of_tiny``: the same
    from the microseconds of the tiny step, which the noise of long steps does not touch.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        page = Path(folder, "rank-0000.page")
        os.environ |= {"OPSD_RANK_PAGE": str(page), "OPSD_RUN_DIR": folder}
        install(opsd.client).begin()
        switch = _Switch()
        differences, _ = _pairs(_tiny(1), switch, TINY_PAIRS)
        many, _ = _pairs(_tiny(MICRO_BATCHES), switch, TINY_PAIRS // 10)
        results: dict[str, float | int] = {
            "ours_us_per_step": 1e6 * statistics.median(differences),
            "ours_us_per_step_64": 1e6 * statistics.median(many),
        }
        step = _nanogpt()
        if step is not None:
            differences, plain = _pairs(step, switch, NANOGPT_PAIRS)
            usual = statistics.median(plain)
            low, high = _interval(differences)
            results |= {
                "nanogpt_step_ms": 1e3 * usual,
                "nanogpt_percent": 100 * statistics.median(differences) / usual,
                "nanogpt_percent_low": 100 * low / usual,
                "nanogpt_percent_high": 100 * high / usual,
                "nanogpt_percent_of_tiny": 1e-4 * results["ours_us_per_step"] / usual,
            }
        return results | {"steps_seen": read_page(page).steps_reported}


class _Switch:
    """Puts all hooks in and takes them out."""

    def __init__(self) -> None:
        optimizer: Any = importlib.import_module("torch.optim.optimizer")  # the package does not have it by name
        self._global: list[dict[int, Any]] = [
            optimizer._global_optimizer_pre_hooks,
            optimizer._global_optimizer_post_hooks,
        ]
        self._hooks = [dict(hooks) for hooks in self._global]

    def __call__(self, on: bool) -> None:
        for owner, name, original, hook in REPLACED:
            setattr(owner, name, hook if on else original)
        for hooks, ours in zip(self._global, self._hooks, strict=True):
            hooks.clear()
            hooks.update(ours if on else {})


def _pairs(step: Step, switch: _Switch, count: int) -> tuple[list[float], list[float]]:
    """The seconds that hooks add in each of ``count`` pairs of steps, and the seconds of those without."""
    order = random.Random(1)
    for on in (True, False) * (WARM // 2):
        switch(on)
        step()
    differences, plain = [], []
    for _ in range(count):
        seconds = {}
        for on in order.sample((True, False), 2):
            switch(on)
            began = time.thread_time()
            step()
            seconds[on] = time.thread_time() - began
        differences.append(seconds[True] - seconds[False])
        plain.append(seconds[False])
    return differences, plain


def _interval(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, from the order of the values (binomial, normal approximation)."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * count**0.5
    return ordered[int(count / 2 - reach)], ordered[int(count / 2 + reach)]


def _tiny(micro_batches: int) -> Step:
    model = torch.nn.Linear(1, 1)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=1e-6), torch.ones(1, 1)

    def step() -> None:
        for _ in range(micro_batches):
            model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _nanogpt() -> Step | None:
    """One iteration of nanoGPT's train.py, None without a checkout."""
    source = Path(os.environ.get("OPSD_OUTSIDE", "/nonexistent"), "nanoGPT/model.py")
    if not source.is_file():
        return None
    spec = importlib.util.spec_from_file_location("nanogpt_model", source)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.GPT(module.GPTConfig(**NANOGPT))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    tokens = torch.randint(NANOGPT["vocab_size"], (100_000,))

    def step() -> None:
        starts = torch.randint(len(tokens) - 65, (BATCH,))
        x = torch.stack([tokens[start : start + 64] for start in starts])
        y = torch.stack([tokens[start + 1 : start + 65] for start in starts])
        _, loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step
