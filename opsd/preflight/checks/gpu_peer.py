"""Copies between every two GPUs of the node: bandwidth in each direction, and whether the data arrives unchanged."""

from __future__ import annotations

import time
from itertools import permutations
from typing import TYPE_CHECKING, Final

from opsd.preflight import gpus
from opsd.preflight.base import (
    Bounds,
    Check,
    Context,
    Finding,
    Measure,
    Measurement,
    NotApplicableError,
    Outcome,
    Peers,
    Progress,
    Verdict,
)
from opsd.preflight.gpus import synchronise

if TYPE_CHECKING:
    import torch

_BYTES: Final = {"cuda": 512 << 20, "cpu": 1 << 18}


def run(context: Context, progress: Progress) -> Outcome:
    """Copy between every ordered pair of devices for its share of ``context.seconds``."""
    devices = gpus.torch_devices(context)
    if context.device == "cuda" and len(devices) < 2:
        raise NotApplicableError("a single GPU has no peers")
    pairs = [*permutations(devices, 2)] or [(devices[0], devices[0])]
    measurements: list[Measurement] = []
    findings: list[Finding] = []
    for done, (source, target) in enumerate(pairs):
        progress(done / len(pairs), "")
        name = f"{gpus.device_name(source)} to {gpus.device_name(target)}"
        try:
            rate, damaged = copy_between(source, target, context.seconds / len(pairs))
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            findings.append(Finding(Verdict.FAIL, f"{name}: the copy failed: {reason}", subject=name))
            continue
        measurements += [Measurement("bandwidth", rate, name), Measurement("damaged", damaged, name)]
    return Outcome(tuple(measurements), tuple(findings))


def copy_between(source: torch.device, target: torch.device, seconds: float) -> tuple[float, int]:
    """Bytes per second from one device to the other, and how many bytes arrived changed."""
    import torch

    sent = torch.randint(0, 256, (_BYTES[source.type],), dtype=torch.uint8, device=source)
    received = torch.empty_like(sent, device=target)
    received.copy_(sent)
    synchronise(target)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds or not count:
        received.copy_(sent, non_blocking=True)
        synchronise(source)
        synchronise(target)
        count += 1
    rate = sent.nbytes * count / (time.perf_counter() - began)
    return rate, int((received.cpu() != sent.cpu()).sum())


CHECK = Check(
    name="gpu_peer",
    title="Copies between the GPUs of the node",
    run=run,
    seconds={"quick": 6, "standard": 30, "spare": 30},
    measures=(
        Measure("bandwidth", "bytes_per_second", "peer copy", "higher", peers=Peers(0.10, 0.25), noise=0.05),
        Measure("damaged", "", "bytes that arrived changed", "lower", Bounds(fail=0)),
    ),
    needs=frozenset({"gpu", "torch", "exclusive"}),
    advice="compare `nvidia-smi nvlink -s` and `nvidia-smi topo -m` with a healthy node; restart nvidia-fabricmanager",
    runbook="nvlink_errors",
)
