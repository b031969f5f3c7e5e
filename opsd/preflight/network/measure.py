"""Measures one spec inside an initialised process group. The only module here that calls torch.distributed.

A node has one process per GPU, or one. Ranks count the nodes of the group first and the local processes second, so that
processes with the same local number, which share a rail, exchange with each other.

Starts measuring processes in milliseconds: imports torch once, has no threads, and forks for every test.

It reads one JSON object a line, with ``spec``, ``node`` (its number), ``rank`` (the first one of this node), ``local``
(processes of this node) and ``store`` (host and port). It answers one ``Done`` a line. A test that is late is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random
from typing import IO, TYPE_CHECKING, Any, Final, Self

from pydantic import TypeAdapter

from opsd.preflight.network.coordinator import Done, Spec

if TYPE_CHECKING:
    import torch

_PERMUTATIONS: Final = 4
_OVERHEAD_S: Final = 1e-4
"""Approximate cost of the barrier before an iteration."""
_MOST_ITERATIONS: Final = 1000


def seconds(spec: Spec, rank: int, world: int, device: torch.device) -> list[float]:
    """Seconds of every iteration: of the collective, or of this rank's slowest exchange. Raises RuntimeError."""
    if spec.pattern == "collective":
        step = collective(spec.name, spec.size, rank, world, device)
    else:
        local = world // len(spec.members)
        step = exchange(_rounds(spec), rank // local, rank % local, local, spec.size, device)
    step()
    took = agreed(step() + _OVERHEAD_S, device)
    iterations = min(_MOST_ITERATIONS, max(spec.iterations, int(spec.seconds / took)))
    return [step() for _ in range(iterations)]


def agreed(value: float, device: torch.device) -> float:
    """The largest ``value`` of all ranks."""
    import torch
    import torch.distributed as dist

    largest = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest.item())


def _rounds(spec: Spec) -> list[list[Pair]]:
    n = len(spec.members)
    match spec.pattern:
        case "ring":
            return ring(n)
        case "permutations":
            return permutations(n, _PERMUTATIONS, Random(spec.test))
        case "incast":
            return incast(n)
    return circle(n)


def exchange(
    rounds: Sequence[Sequence[Pair]], node: int, rail: int, local: int, size: int, device: torch.device
) -> Callable[[], float]:
    """A step that goes through ``rounds`` and returns the seconds of this rank's slowest round.

    In rounds of disjoint pairs both partners send and receive; otherwise the first of a pair sends to the second.
    """
    import torch
    import torch.distributed as dist

    senders = max((sum(1 for _, to in pairs if to == node) for pairs in rounds), default=0)
    outgoing = torch.zeros(size, dtype=torch.uint8, device=device)
    incoming = [torch.empty_like(outgoing) for _ in range(max(1, senders))]

    def operations(pairs: Sequence[Pair]) -> list[dist.P2POp]:
        both_ways = len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
        sends = [to for one, to in pairs if one == node] + [one for one, to in pairs if both_ways and to == node]
        receives = [one for one, to in pairs if to == node] + [to for one, to in pairs if both_ways and one == node]
        peers = zip(receives, incoming, strict=False)
        return [
            *(dist.P2POp(dist.isend, outgoing, to * local + rail) for to in sends),
            *(dist.P2POp(dist.irecv, buffer, one * local + rail) for one, buffer in peers),
        ]

    plan = [operations(pairs) for pairs in rounds]

    def step() -> float:
        slowest = 0.0
        for wanted in plan:
            dist.barrier()
            began = time.perf_counter()
            for request in dist.batch_isend_irecv(wanted) if wanted else ():
                request.wait()
            _finish(device)
            slowest = max(slowest, time.perf_counter() - began if wanted else 0.0)
        return slowest

    return step


def collective(name: str, size: int, rank: int, world: int, device: torch.device) -> Callable[[], float]:
    """A step that runs the collective over ``size`` bytes in total and returns its seconds."""
    import torch
    import torch.distributed as dist

    each = max(1, size // 4 // world)
    whole = torch.ones(each * world, dtype=torch.float32, device=device)
    part = torch.ones(each, dtype=torch.float32, device=device)
    other = torch.empty_like(whole)

    def send_recv() -> None:
        kind, peer = (dist.isend, (rank + 1) % world), (dist.irecv, (rank - 1) % world)
        for request in dist.batch_isend_irecv(
            [dist.P2POp(kind[0], whole, kind[1]), dist.P2POp(peer[0], other, peer[1])]
        ):
            request.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send_recv": send_recv,
    }
    call = calls[name]

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        call()
        _finish(device)
        return time.perf_counter() - began

    return step


def _finish(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


Pair = tuple[int, int]


def circle(n: int) -> list[list[Pair]]:
    """All pairs of n ranks in rounds of disjoint pairs (round-robin tournament, circle method).

    An even n takes n-1 rounds of n/2 pairs; an odd one n rounds, and in each of them one rank is idle.
    """
    seats: list[int | None] = [*range(n)] + ([None] if n % 2 else [])
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def ring(n: int) -> list[list[Pair]]:
    """Neighbours on a ring: every rank sends to the next one at the same time."""
    return [[(rank, (rank + 1) % n) for rank in range(n)]]


def permutations(n: int, count: int, random: Random) -> list[list[Pair]]:
    """``count`` random assignments in which every rank sends to one other and receives from one other."""
    rounds = []
    for _ in range(count):
        order = [*range(n)]
        random.shuffle(order)
        rounds.append(sorted(zip(order, [*order[1:], order[0]], strict=True)))
    return rounds


def incast(n: int) -> list[list[Pair]]:
    """All ranks send to rank 0 at the same time."""
    return [[(rank, 0) for rank in range(1, n)]]


def partner(rank: int, pairs: Sequence[Pair]) -> int | None:
    """The partner of ``rank`` in a round of disjoint pairs, None if it is idle."""
    for one, other in pairs:
        if rank in (one, other):
            return other if rank == one else one
    return None


_GRACE_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


class ForkServer:
    """The forking process, itself forked from this one. Create it before this process has threads or connections."""

    def __init__(self) -> None:
        import torch.distributed  # the expensive part, paid once and inherited

        assert torch.distributed.is_available()
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._orders)
            os.close(self._answers)
            _serve(os.fdopen(orders, encoding="utf-8"), answers)
        os.close(orders)
        os.close(answers)
        self._reader = os.fdopen(self._answers, encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._orders)
        self._reader.close()

    def run(self, order: dict[str, Any]) -> Done:
        """Carry out one order. Raises RuntimeError if the fork server has died."""
        try:
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            raise RuntimeError("the measuring process has died") from None
        if not (line := self._reader.readline()):
            raise RuntimeError("the measuring process has died")
        return TypeAdapter(Done).validate_json(line)


def _serve(orders: IO[str], answers: int) -> None:
    """Answer orders until there are no more; never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Deprecated names of torch that work in all supported releases.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    for line in orders:
        order = json.loads(line)
        done = _supervise(TypeAdapter(Spec).validate_python(order["spec"]), order)
        os.write(answers, TypeAdapter(Done).dump_json(done) + b"\n")
    os._exit(0)


def _supervise(spec: Spec, order: dict[str, Any]) -> Done:
    """Fork one process per local rank and collect their results."""
    children: dict[int, int] = {}
    for index in range(order["local"]):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(spec, order, index, writer)
        os.close(writer)
        children[reader] = pid
    try:
        texts = _read_all([*children], spec.deadline_s + _GRACE_S)
    finally:
        for reader, pid in children.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reader)
    answers = [json.loads(text) if text else {"error": "it did not finish"} for text in texts]
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        return Done(error=errors[0])
    # An iteration is as slow as the slowest rail of the node.
    return Done(tuple(max(values) for values in zip(*(a["seconds"] for a in answers), strict=True)))


def _read_all(readers: list[int], seconds: float) -> list[str]:
    """What is written to each pipe until it is closed; "" for those still open after ``seconds``."""
    texts = dict.fromkeys(readers, b"")
    open_ones = {*readers}
    deadline = time.monotonic() + seconds
    while open_ones and (left := deadline - time.monotonic()) > 0:
        for reader in select.select([*open_ones], [], [], left)[0]:
            if chunk := os.read(reader, 1 << 16):
                texts[reader] += chunk
            else:
                open_ones.discard(reader)
    return ["" if reader in open_ones else texts[reader].decode() for reader in readers]


def _child(spec: Spec, order: dict[str, Any], index: int, writer: int) -> None:
    """One rank: measure, write the answer, exit without any clean-up that could hang."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        answer: dict[str, Any] = {"seconds": _measure(spec, order, index)}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": str(error).strip().partition("\n")[0] or type(error).__name__}
    os.write(writer, json.dumps(answer).encode())
    sys.stderr.flush()
    os._exit(0)


def _measure(spec: Spec, order: dict[str, Any], index: int) -> list[float]:
    import torch
    import torch.distributed as dist

    from opsd.preflight.network.member import connect

    limit = timedelta(seconds=spec.deadline_s)
    host, port = order["store"]
    tcp = connect(host, port, serve=False, seconds=spec.deadline_s)
    store = dist.PrefixStore(f"test-{spec.test}", tcp)  # type: ignore[attr-defined]
    local = order["local"]
    rank, world = order["rank"] * local + index, len(spec.members) * local
    device = torch.device("cpu")
    if spec.backend == "nccl":
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(spec.backend, store=store, rank=rank, world_size=world, timeout=limit)
    return seconds(spec, rank, world, device)
