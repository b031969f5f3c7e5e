"""What observing costs a program: the same steps with and without the hooks, in turn, in one thread, in CPU time.

A block has two steps with the hooks and two without, as ABBA or BAAB, so that a machine that grows slower or faster
meanwhile cancels out. Steps are measured until the median of the blocks is known well enough, whatever it is.

nanoGPT is measured where ``OPSD_OUTSIDE`` names a folder with a checkout of it (tests/outside/README.md), in the
configuration that its README has for machines without GPU, on one core.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import opsd.client
from opsd.bench import memory_folder
from opsd.launch.observe import install
from opsd.launch.observe.torch_hooks import REPLACED
from opsd.rank_page import read_page

Step = Callable[[], None]
TINY_BLOCKS, WARM = 1000, 20
LEAST_BLOCKS, MOST_BLOCKS, ENOUGH = 100, 2000, 0.0025
"""Of nanoGPT: blocks are added, a hundred at a time, until half of the interval is at most this share of a step."""
RESAMPLES = 1000
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
    """Medians over blocks of what the hooks add to a step.

    ``ours_us_per_step``: microseconds of a step with one backward pass and one optimizer, ``..._64`` with 64 passes.
    ``nanogpt_percent``: of nanoGPT's step, with the 95 % bootstrap interval of the median over ``nanogpt_blocks``
    blocks; ``nanogpt_percent_of_tiny``: the same from the microseconds of the tiny step, which the noise of long steps
    does not touch.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with memory_folder() as folder:
        page = folder / "rank-0000.page"
        os.environ |= {"OPSD_RANK_PAGE": str(page), "OPSD_RUN_DIR": str(folder)}
        install(opsd.client).begin()
        switch = _Switch()
        results: dict[str, float | int] = {
            "ours_us_per_step": 1e6 * statistics.median(_blocks(_tiny(1), switch, TINY_BLOCKS)[0]),
            "ours_us_per_step_64": 1e6 * statistics.median(_blocks(_tiny(MICRO_BATCHES), switch, TINY_BLOCKS // 10)[0]),
        }
        step = _nanogpt()
        if step is not None:
            differences, plain = _measured_well(step, switch)
            usual = statistics.median(plain)
            low, high = _interval(differences)
            results |= {
                "nanogpt_step_ms": 1e3 * usual,
                "nanogpt_blocks": len(differences),
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


def _blocks(step: Step, switch: _Switch, count: int) -> tuple[list[float], list[float]]:
    """The seconds that hooks add to a step, by block, and the seconds of a step without."""
    order = random.Random(1)
    for on in (True, False) * (WARM // 2):
        switch(on)
        step()
    differences, plain = [], []
    for _ in range(count):
        first, seconds = order.random() < 0.5, {True: 0.0, False: 0.0}
        for on in (first, not first, not first, first):
            switch(on)
            began = time.thread_time()
            step()
            seconds[on] += time.thread_time() - began
        differences.append((seconds[True] - seconds[False]) / 2)
        plain.append(seconds[False] / 2)
    return differences, plain


def _measured_well(step: Step, switch: _Switch) -> tuple[list[float], list[float]]:
    """``_blocks``, as many as it takes; the width of the interval decides, never the cost that is found."""
    differences, plain = list[float](), list[float]()
    while len(differences) < MOST_BLOCKS:
        more, without = _blocks(step, switch, LEAST_BLOCKS)
        differences, plain = differences + more, plain + without
        low, high = _interval(differences)
        if (high - low) / 2 <= ENOUGH * statistics.median(plain):
            break
    return differences, plain


def _interval(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, by resampling the blocks."""
    drawn = random.Random(2)
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


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
