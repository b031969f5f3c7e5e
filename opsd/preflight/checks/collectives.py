"""Collectives between the GPUs of this node over NCCL: NVLink, NVSwitch and NVLink SHARP where there is any."""

from __future__ import annotations

import os

from opsd.ports import free_port
from opsd.preflight import gpus
from opsd.preflight.base import Check, Context, NotApplicableError, Outcome, Progress
from opsd.preflight.network import plan
from opsd.preflight.network.member import Participant, leading
from opsd.preflight.network.rendezvous import Place


def run(context: Context, progress: Progress) -> Outcome:
    """All collectives over one process per GPU; over two on the processor if the context says so."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    on_gpus = context.device == "cuda"
    processes = len(gpus.torch_devices(context)) if on_gpus else 2
    if processes < 2:
        raise NotApplicableError("a single GPU has no peers")
    how = plan.effort("quick" if context.profile == "quick" else "standard", gpus=on_gpus)
    participant = Participant(
        Place((context.node,), 0, "127.0.0.1", free_port()), processes, "nccl" if on_gpus else "gloo", 60.0
    )
    with leading(participant, how.deadline_s) as coordinator:
        coordinator.gather(participant.join_s)
        return plan.collectives(coordinator, [0], processes, how, lambda what: progress(0.5, what))


CHECK = Check(
    name="collectives",
    title="Collectives between the GPUs of the node",
    run=run,
    seconds={"quick": 20, "standard": 120, "burn-in": 120, "spare": 120},
    measures=plan.COLLECTIVES.measures,
    needs=frozenset({"gpu", "torch", "exclusive"}),
    advice="480 GB/s of all-reduce bus bandwidth is normal for 8 H100 with NVLS, 367 without; check fabric manager",
    runbook="nvlink_errors",
)
