"""Runs the same work on every device in parallel, one thread each; a failing device does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from opsd.preflight.base import Finding, Verdict
from opsd.preflight.gpus import device_name

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def on_each(devices: Sequence[torch.device], work: Callable[[torch.device], T]) -> tuple[dict[str, T], list[Finding]]:
    """Results by device name, and a finding for every device that raised RuntimeError, torch's CUDA errors."""
    results: dict[str, T] = {}
    findings: list[Finding] = []
    with ThreadPoolExecutor(len(devices)) as pool:
        futures = {device_name(device): pool.submit(work, device) for device in devices}
    for name, future in futures.items():
        error = future.exception()
        if error is None:
            results[name] = future.result()
        elif isinstance(error, RuntimeError):
            reason = str(error).strip().partition("\n")[0]
            advice = "read `dmesg | grep -i xid`, drain the node and reset the GPU"
            findings.append(Finding(Verdict.FAIL, f"{name} stopped computing: {reason}", advice, name))
        else:
            raise error
    return results, findings
