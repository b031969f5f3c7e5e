"""Starts measuring processes in milliseconds: imports torch once, has no threads, and forks for every test.

It reads one JSON object per line, ``{"spec": …, "node": number, "rank": first rank of this node, "local": processes of
this node, "store": [host, port]}``, and answers one ``Done`` per line. A test that does not end in time is killed.
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
from datetime import timedelta
from typing import IO, Any, Final, Self

from pydantic import TypeAdapter

from opsd.preflight.network.coordinator import Done, Spec

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

    from opsd.preflight.network.measure import seconds
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
