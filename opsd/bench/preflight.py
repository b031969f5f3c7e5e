"""``opsd bench preflight``: duration of the profiles, accuracy of the search, overhead of the measurements.

The search runs on four network namespaces over gloo with traffic control slowing one of them, and on simulated
clusters. Our all-reduce is timed against a plain loop in the same two processes, the GEMM burn against torch.mm on the
same GPU. Measurements that this machine cannot do (no root, no GPU) are missing from the result.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from opsd.bench.namespaces import Namespaces, NoNamespacesError
from opsd.preflight.simulated_cluster import PLANTS, score

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    import torch

TRIALS: Final = 20
_SIMULATED: Final = 200
_NODES: Final = 4
_MBIT: Final = 100.0
_SLOW: Final = 0.7
_ALLREDUCE: Final = 8 << 20
_BURN_S: Final = 20.0


def run() -> dict[str, float | int | str]:
    """All measurements that this machine allows."""
    results: dict[str, float | int | str] = {}
    with tempfile.TemporaryDirectory(prefix="opsd-bench-") as folder:
        for profile in ("quick", "standard"):
            results[f"ours_{profile}_s"] = _profile_seconds(profile, Path(folder))
    results |= _simulations()
    if importlib.util.find_spec("torch") is not None:
        results |= _allreduce()
        results |= gemm()
        try:
            results |= _namespaces()
        except NoNamespacesError as error:
            results["note_namespaces"] = str(error)
    return results


def _profile_seconds(profile: str, folder: Path) -> float:
    """Wall-clock seconds of the whole command, including the interpreter's start."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "opsd", "preflight", "--profile", profile, "--quiet"],
        env={**os.environ, "OPSD_STATE_DIR": str(folder)},
        check=False,
        timeout=1800,
    )
    return time.perf_counter() - began


def _simulations() -> dict[str, float | int | str]:
    """Share of right diagnoses and the most tests used, over all kinds of faults except the undetectable one."""
    results: dict[str, float | int | str] = {}
    for nodes, per_switch in ((232, 16), (1024, 32)):
        scores = [score(plant, nodes, per_switch, _SIMULATED, seed=1) for plant in PLANTS]
        promised = [entry for entry in scores if entry.plant != "flaky in 30 % of the tests"]
        results[f"ours_simulated_{nodes}_right_ratio"] = min(entry.right / entry.trials for entry in promised)
        results[f"ours_simulated_{nodes}_tests_max"] = max(entry.most_tests for entry in promised)
    return results


def _namespaces() -> dict[str, float | int | str]:
    """Trials with one node slowed by 30 %, and as many with none, in one session of the four nodes."""
    random = Random(0)
    named = blamed = 0
    with Namespaces(_NODES, mbit=_MBIT) as cluster, tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "OPSD_STATE_DIR": state}
        began = time.perf_counter()
        leader = subprocess.Popen(
            [*cluster.command(0), sys.executable, "-m", "opsd.bench.search_leader", cluster.address(0), str(_NODES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        members = [_member(cluster, number, environment) for number in range(1, _NODES)]
        assert leader.stdin is not None and leader.stdout is not None
        try:
            for trial in range(2 * TRIALS):
                slow = random.randrange(_NODES) if trial % 2 else None
                for node in range(_NODES):
                    cluster.set_speed(node, _MBIT * _SLOW if node == slow else _MBIT)
                leader.stdin.write("search\n")
                leader.stdin.flush()
                culprits: list[str] = json.loads(leader.stdout.readline())
                named += slow is not None and culprits == [f"node n{slow}"]
                blamed += slow is None and bool(culprits)
            leader.stdin.close()
            leader.wait(timeout=60)
        finally:
            everybody: list[subprocess.Popen[Any]] = [leader, *members]
            for process in everybody:
                process.kill()
                process.wait()
    return {
        "ours_search_slow_node_named": named,
        "ours_search_healthy_blamed": blamed,
        "ours_search_trials_each": TRIALS,
        "ours_search_seconds_each": (time.perf_counter() - began) / (2 * TRIALS),
    }


def _member(cluster: Namespaces, number: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    where = ["--hosts", f"n[0-{_NODES - 1}]", "--node", str(number), "--rendezvous", cluster.address(0)]
    command = [*cluster.command(number), sys.executable, "-m", "opsd", "preflight", "network", *where]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def _allreduce() -> dict[str, float | int | str]:
    """Bus bandwidth of our all-reduce and of a plain loop, alternating in the same two processes."""
    context = multiprocessing.get_context("spawn")
    answers: Queue[tuple[float, float]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_allreduce_rank, args=(rank, f"{folder}/store", answers)) for rank in range(2)]
        for process in ranks:
            process.start()
        ours, loop = answers.get(timeout=300)
        for process in ranks:
            process.join()
    return {"ours_allreduce_busbw": ours, "loop_allreduce_busbw": loop, "ratio_allreduce_busbw": ours / loop}


def _allreduce_rank(rank: int, store: str, answers: Queue[tuple[float, float]]) -> None:
    import torch
    import torch.distributed as dist

    from opsd.preflight.network.bandwidth import busbw
    from opsd.preflight.network.measure import collective

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    step = collective("all_reduce", _ALLREDUCE, rank, 2, torch.device("cpu"))
    tensor = torch.ones(_ALLREDUCE // 4)

    def plain() -> float:
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        return time.perf_counter() - began

    times: dict[Callable[[], float], list[float]] = {step: [], plain: []}
    for _ in range(60):
        for measure, seconds in times.items():
            seconds.append(measure())
    if rank == 0:
        ours, loop = (busbw("all_reduce", _ALLREDUCE, median(seconds), 2) for seconds in times.values())
        answers.put((ours, loop))
    dist.barrier()
    dist.destroy_process_group()


def gemm() -> dict[str, float | int | str]:
    """Throughput of the burn beside plain torch.mm of the same shape, on the first GPU; {} without one.

    They take turns, because a GPU slows down as it gets hot. Both numbers are medians over the last half.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    ours, plain = in_turns(torch.device("cuda", 0), _BURN_S)
    return {"ours_burn_flops": ours, "torch_mm_flops": plain, "ratio_burn": ours / plain}


def in_turns(device: torch.device, seconds: float, turns: int = 4) -> tuple[float, float]:
    """FLOP/s of the burn and of torch.mm, which have ``seconds`` each: medians over the last half of the turns."""
    import torch

    from opsd.preflight.burn import bf16, burn, size_of, synchronise

    size, each = size_of(device), seconds / turns
    ours, plain = [], []
    for _ in range(turns):
        torch.cuda.empty_cache()
        ours.append(burn(device, bf16, seconds=each, size=size, progress=lambda _share: None).flops)
        left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        rates, until = [], time.perf_counter() + each
        while (began := time.perf_counter()) < until:
            for _ in range(50):
                torch.mm(left, right)
            synchronise(device)
            rates.append(50 * 2.0 * size**3 / (time.perf_counter() - began))
        plain.append(median(rates))
        del left, right
    return median(ours[turns // 2 :]), median(plain[turns // 2 :])
