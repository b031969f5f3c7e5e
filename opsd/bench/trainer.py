"""``opsd bench trainer``: tokens/s of the trainer beside torchtitan and transformers' models under plain FSDP2.

All have the same shape and train on the same micro-batches in turn, so that other load on the machine affects all.
transformers' Llama begins with the same weights, and so does its mixture of experts of the same shape. torchtitan needs
a newer torch and runs in its own process (``torchtitan_cpu``) if ``make torchtitan`` has installed it. Also measured:
the time from the command to the fifth step of eight ranks in three dimensions of parallelism, and what replays cost:
the time of one, over that of the steps between two of them if a step has one micro-batch only, which is the worst case.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from opsd.bench import BenchError
from opsd.bench.recovery import make_shards
from opsd.client import Reporter
from opsd.trainer.accumulate import accumulator
from opsd.trainer.config import Config, load
from opsd.trainer.data.loader import Batch
from opsd.trainer.hf.config import config_of
from opsd.trainer.hf.weights import fill
from opsd.trainer.optimizer import Optimizer
from opsd.trainer.parallel import build
from opsd.trainer.replay import Repeatable, Replay
from opsd.trainer.settings import ReplaySettings
from opsd.trainer.world import World, join

STEPS, WARMUP = 31, 3
MICRO_BATCHES, ROWS, LENGTH, VOCAB = 2, 4, 128, 4096
SETTINGS = (
    "run.device=cpu", "run.steps=1000", "data.shards=-", f"data.micro_batch={ROWS}", f"data.sequence={LENGTH}",
    f"data.batch={MICRO_BATCHES * ROWS}", "model.layers=4", "model.width=256", "model.heads=8", "model.kv_heads=4",
    "model.ffn=704", f"model.vocab={VOCAB}", "model.nope_every=0", "model.document_mask=false",
    "optimizer.lr=1e-3", "run.deterministic=false", "run.threads=0",
)  # fmt: skip

EXPERTS = (
    "model.experts=8", "model.experts_per_token=2", "model.expert_ffn=352", "model.ffn=352",
    "model.router_normalised=true",
)  # fmt: skip

Step = Callable[[int], float]
"""Trains step n and returns its loss, nan if it is not known."""

TORCHTITAN = Path(__file__).parents[2] / ".venv-torchtitan" / "bin" / "python"


def run() -> dict[str, float | int]:
    """Tokens per second, medians of 31 steps each; ``difference_loss`` is the largest relative difference of a step.

    Those of the mixture of experts begin with ``moe_``.

    Raises BenchError if the ranks of ``ours_dp2_tp2_pp2_five_steps_s`` fail.
    """
    config, sparse = load("tiny", SETTINGS, {}), load("tiny", [*SETTINGS, *EXPERTS], {})
    world = join(config.run, config.parallel, {})
    try:
        with _torchtitan(config) as titan:
            results = _compare(_alike(config, world) | ({"torchtitan": titan} if titan else {}))
        results |= {f"moe_{name}": value for name, value in _compare(_alike(sparse, world)).items()}
        results["ours_replay_ratio"] = _replay_ratio(config, world)
    finally:
        dist.destroy_process_group()
    return results | {"ours_dp2_tp2_pp2_five_steps_s": _five_steps_s()}


def _five_steps_s() -> float:
    """Seconds from ``opsd launch`` to the fifth step of the tiny preset as DP 2 x TP 2 x PP 2 on gloo."""
    with tempfile.TemporaryDirectory(prefix="opsd-bench-") as name:
        folder = Path(name)
        settings = {
            "data.shards": make_shards(folder), "data.micro_batch": 1, "run.steps": 5,
            "parallel.tp": 2, "parallel.pp": 2,
        }  # fmt: skip
        launch = [sys.executable, "-m", "opsd", "launch", "--standalone", "--nproc-per-node=8", f"--run-dir={folder}"]
        sets = [f"--set={key}={value}" for key, value in settings.items()]
        environ = os.environ | {"OPSD_SHM": str(folder / "shm")}
        began = time.time()
        command = [*launch, "-m", "opsd.trainer", "tiny", *sets]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"the eight ranks failed: {done.stderr[-800:]}")
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return float(json.loads(lines[4])["t"]) - began


def _compare(contenders: dict[str, Step]) -> dict[str, float | int]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(WARMUP + STEPS):
        for name, step in contenders.items():
            began = time.perf_counter()
            losses[name].append(step(number))
            times[name].append(time.perf_counter() - began)
    tokens = MICRO_BATCHES * ROWS * LENGTH
    rates = {name: tokens / statistics.median(seconds[WARMUP:]) for name, seconds in times.items()}
    results: dict[str, float | int] = {f"{name}_tokens_per_s": rate for name, rate in rates.items()}
    results["tokens_per_step"] = tokens
    for peer in contenders.keys() - {"ours"}:
        results[f"ratio_{peer}"] = rates["ours"] / rates[peer]
        if math.isnan(losses[peer][0]):
            continue
        pairs = zip(losses["ours"], losses[peer], strict=True)
        results[f"difference_loss_{peer}"] = max(abs(a - b) / b for a, b in pairs)
    return results


class _Stream:
    """The same random tokens for every contender."""

    def __init__(self) -> None:
        self._next = 0

    def next(self) -> Batch:
        """The next micro-batch."""
        generator = torch.Generator().manual_seed(self._next)
        drawn = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
        self._next += 1
        documents = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
        return Batch(self._next, drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), documents)


def _replay_ratio(config: Config, world: World) -> float:
    """Medians of replays and steps in turn."""
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"every": 1})})
    model, batches = build(config, world), Repeatable(_Stream())
    gradients = accumulator(model, batches, config, world, Reporter(None))
    optimizer = Optimizer(model, config.optimizer)
    replay = Replay(model, batches, gradients, config, world, Reporter(None))
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(WARMUP + STEPS):
        began = time.perf_counter()
        *_, square = world.sum([*gradients(1), optimizer.take_gradients()])
        optimizer.update(config.optimizer.lr, math.sqrt(square))
        stepped = time.perf_counter()
        replay(number)
        times[0].append(stepped - began)
        times[1].append(time.perf_counter() - stepped)
    step_s, replay_s = (statistics.median(seconds[WARMUP:]) for seconds in times)
    return replay_s / (ReplaySettings().every * step_s)


def _alike(config: Config, world: World) -> dict[str, Step]:
    """The trainer, and transformers where it is installed, with the same weights."""
    if find_spec("transformers") is None:
        return {"ours": _ours(config, world)}
    with tempfile.TemporaryDirectory(prefix="opsd-bench-") as name:
        peer = _peer(config, Path(name))
        return {"ours": _ours(config, world, Path(name)), "transformers_fsdp2": peer}


def _ours(config: Config, world: World, weights: Path | None = None) -> Step:
    model = build(config, world)
    if weights is not None:
        fill(model, weights)
    gradients = accumulator(model, _Stream(), config, world, Reporter(None))
    optimizer = Optimizer(model, config.optimizer)

    def step(_: int) -> float:
        loss, *_rest, square = world.sum([*gradients(MICRO_BATCHES), optimizer.take_gradients()])
        optimizer.update(config.optimizer.lr, math.sqrt(square))
        return loss

    return step


def _peer(config: Config, folder: Path) -> Step:
    """The same model in transformers, whose weights it writes to ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stream = _Stream()
    _, fields = config_of(config.model, LENGTH)
    build_peer: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = build_peer(AutoConfig.for_model(**fields))
    model.save_pretrained(folder)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded: Any = model
    decayed = [value for name, value in model.named_parameters() if value.dim() > 1 and "embed" not in name]
    others = [value for name, value in model.named_parameters() if value.dim() == 1 or "embed" in name]
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True,
    )  # fmt: skip

    def step(_: int) -> float:
        total = 0.0
        for micro in range(MICRO_BATCHES):
            sharded.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            batch = stream.next()
            answer = sharded(input_ids=batch.tokens, labels=batch.targets, shift_labels=batch.targets, use_cache=False)
            torch.autograd.backward(answer.loss / MICRO_BATCHES)
            total += answer.loss.item() / MICRO_BATCHES
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


@contextmanager
def _torchtitan(config: Config) -> Iterator[Step | None]:
    """torchtitan, which begins with other weights; None if it is not installed."""
    if not TORCHTITAN.exists():
        yield None
        return
    model = config.model
    shape = {
        "layers": model.layers, "width": model.width, "heads": model.heads, "kv_heads": model.kv_heads,
        "ffn": model.ffn, "vocab": VOCAB, "length": LENGTH, "rows": ROWS, "micro_batches": MICRO_BATCHES,
    }  # fmt: skip
    command = [str(TORCHTITAN), "-m", "opsd.bench.torchtitan_cpu", json.dumps(shape)]
    environ = os.environ | {"PYTHONPATH": str(TORCHTITAN.parents[2])}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def step(_: int) -> float:
            orders.write(b"\n")
            orders.flush()
            if not answers.readline():
                log.seek(0)
                raise BenchError(f"torchtitan failed: {log.read().decode(errors='replace')[-800:]}")
            return math.nan

        yield step
