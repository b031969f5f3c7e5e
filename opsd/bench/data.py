"""Finding a sample of SmolLM3's mixture at any point of a run, beside Grain, Megatron and a growing index."""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import time
import tomllib
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from operator import truediv
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from opsd.trainer.config import MIXTURES
from opsd.trainer.data.mixture import Mixture
from opsd.trainer.data.stages import Stage

BATCH = 576
"""SmolLM3's global batch in sequences."""

SEQUENCES = 10_000_019
"""Sequences of each source: 41 GB of tokens at 4,096 per sequence."""

PLACES = (0, 10**3, 10**6, 10**9, 10**11, 10**13)
ROUNDS, BATCHES = 15, 16
INDEX_SIZES = (10**6, 10**8)
GRAIN_SAMPLES = 2000

Results = dict[str, float]


def run() -> Results:
    """Microseconds per sample, seconds and MiB. Memory is the growth of the process; each peer has its own.

    ``ours_flat_ratio`` is the most expensive of ``PLACES`` divided by the cheapest. A round measures all of them, and
    each cost is relative to the round's mean, because the speed of the machine varies. ``megatron`` is the compiled
    helper of the megatron-core wheel, ``growing`` the method of nanotron's nanosets: 16 bytes for every sample of the
    run, in every rank. Both are built for the first stage only.
    """
    results = _alone(_ours)
    for size in INDEX_SIZES:
        results |= _alone(partial(_growing, size))
        if helpers := _megatron_helpers():
            results |= _alone(partial(_megatron, helpers, size))
    if importlib.util.find_spec("grain"):
        results |= _alone(_grain)
        results["ratio_grain"] = results["ours_sample_us"] / results["grain_sample_us"]
    return results


def _mixture() -> Mixture:
    stages = tomllib.loads((MIXTURES / "smollm3.toml").read_text(encoding="utf-8"))["stages"]
    plan = [Stage((stage["start"] - 1) * BATCH, stage["weights"]) for stage in stages]
    return Mixture(plan, {name: SEQUENCES for stage in plan for name in stage.weights}, 1)


def _weights() -> list[float]:
    stages = tomllib.loads((MIXTURES / "smollm3.toml").read_text(encoding="utf-8"))["stages"]
    return list(stages[0]["weights"].values())


def _ours() -> Results:
    mixture = _mixture()
    offsets = np.arange(BATCHES)[:, None] * BATCH + np.arange(BATCH)
    times: dict[int, list[float]] = {place: [] for place in PLACES}
    memory: dict[int, float] = {}
    for number in range(ROUNDS):
        for place in PLACES:
            batches = (offsets + place + number * offsets.size).astype(np.uint64)
            began = time.perf_counter()
            for batch in batches:
                mixture.locate(batch)
            times[place].append((time.perf_counter() - began) / batches.size * 1e6)
            memory[place] = _resident_mib()
    seeks = []
    for place in PLACES:
        began = time.perf_counter()
        mixture.locate((np.arange(BATCH) + place * 7).astype(np.uint64))
        seeks.append((time.perf_counter() - began) * 1e3)
    began = time.perf_counter()
    _mixture()
    cost = {place: statistics.median(rounds) for place, rounds in times.items()}
    means = [statistics.mean(one) for one in zip(*times.values(), strict=True)]
    relative = [statistics.median(map(truediv, rounds, means)) for rounds in times.values()]
    return {
        "ours_sample_us": cost[0],
        "ours_sample_us_at_1e13": cost[10**13],
        "ours_flat_ratio": max(relative) / min(relative),
        "ours_memory_mib_1e3_to_1e13": memory[10**13] - memory[10**3],
        "ours_seek_ms": max(seeks),
        "ours_start_s": time.perf_counter() - began,
    }


def _growing(size: int) -> Results:
    """Source and sequence of every sample of the run, shuffled, as two arrays of 64-bit integers."""
    before, began = _resident_mib(), time.perf_counter()
    weights = np.array(_weights())
    counts = np.floor(weights * size).astype(np.int64)
    counts[0] += size - counts.sum()
    source = np.repeat(np.arange(len(counts)), counts)
    sequence = np.concatenate([np.arange(count) % SEQUENCES for count in counts])
    order = np.random.default_rng(1).permutation(size)
    source, sequence = source[order], sequence[order]
    del order
    return _index_results("growing", size, began, before, source.nbytes + sequence.nbytes)


def _megatron_helpers() -> ModuleType | None:
    """The compiled helper alone; importing megatron.core would load all of it."""
    package = importlib.util.find_spec("megatron")
    for folder in (package.submodule_search_locations or []) if package else []:
        for path in Path(folder).glob("core/datasets/helpers_cpp*.so"):
            spec = importlib.util.spec_from_file_location("helpers_cpp", path)
            assert isinstance(spec, ModuleSpec)
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


def _megatron(helpers: ModuleType, size: int) -> Results:
    before, began = _resident_mib(), time.perf_counter()
    weights = np.array(_weights())
    source: npt.NDArray[np.int16] = np.zeros(size, dtype=np.int16)
    sequence: npt.NDArray[np.int64] = np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(source, sequence, weights, len(weights), size, False)
    return _index_results("megatron", size, began, before, source.nbytes + sequence.nbytes)


def _index_results(name: str, size: int, began: float, before_mib: float, index_bytes: int) -> Results:
    key = f"{name}_{{}}_{size:.0e}".replace("e+0", "e")
    return {
        key.format("build_s"): time.perf_counter() - began,
        key.format("memory_mib"): max(_resident_mib() - before_mib, index_bytes / 2**20),
    }


def _grain() -> Results:
    import grain

    weights = _weights()
    sources = [grain.MapDataset.range(SEQUENCES).shuffle(seed=number).repeat() for number in range(len(weights))]
    mixed = grain.MapDataset.mix(sources, weights)
    results = {}
    for key, place in (("grain_sample_us", 0), ("grain_sample_us_at_1e9", 10**9)):
        rounds = []
        for number in range(ROUNDS // 3):
            began = time.perf_counter()
            for sample in range(GRAIN_SAMPLES):
                mixed[place + number * GRAIN_SAMPLES + sample]
            rounds.append((time.perf_counter() - began) / GRAIN_SAMPLES * 1e6)
        results[key] = statistics.median(rounds)
    return results


def _alone(work: Callable[[], Results]) -> Results:
    """The result of ``work`` in a process forked for it, so that its memory can be measured."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process: Any = multiprocessing.get_context("fork").Process(target=_answer, args=(theirs, work))
    process.start()
    theirs.close()
    try:
        results: Results = ours.recv()
    except EOFError:
        raise RuntimeError("a part of the benchmark died; see above") from None
    finally:
        process.join()
    return results


def _answer(connection: Connection, work: Callable[[], Results]) -> None:
    connection.send(work())


def _resident_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20
