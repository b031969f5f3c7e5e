"""The node's GPUs for checks: what NVML says about them, and torch's devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from opsd.collectors.base import GpuFact, Metric, NoData, Sample
from opsd.collectors.nvml import NvmlCollector, NvmlError
from opsd.preflight.base import Context, CouldNotRunError, Finding, UnfitError, Verdict

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One reading of all GPUs through NVML."""

    gpus: Sequence[GpuFact]
    samples: Sequence[Sample]

    def value(self, gpu: GpuFact, metric: Metric, *extra: str) -> float | None:
        """The value of ``metric`` for ``gpu``; ``extra`` are its last labels. None if the driver does not report it."""
        for sample in self.samples:
            mine = sample.metric is metric and sample.labels[0] == str(gpu.index)
            if mine and (not extra or sample.labels[-len(extra) :] == extra):
                return sample.value
        return None

    def labels(self, gpu: GpuFact, metric: Metric) -> dict[str, str]:
        """The labels of the first series of ``metric`` that belongs to ``gpu``."""
        for sample in self.samples:
            if sample.metric is metric and sample.labels[0] == str(gpu.index):
                return dict(zip(metric.labels, sample.labels, strict=True))
        return {}


def look(context: Context) -> Snapshot:
    """Ask NVML about every GPU.

    Raises NotApplicableError on a node that neither has nor should have GPUs, UnfitError if the driver fails.
    """
    try:
        reading = NvmlCollector(context.nvml_library).collect()
    except NvmlError as error:
        raise UnfitError(f"{error}; read `dmesg | grep NVRM`, reload the driver or reboot the node") from error
    if isinstance(reading, NoData):
        raise UnfitError(f"{reading.reason}; install or load the NVIDIA driver")
    gpus = [fact for fact in reading.facts if isinstance(fact, GpuFact)]
    return Snapshot(gpus, reading.samples)


def name(gpu: GpuFact) -> str:
    """The name of a GPU in reports."""
    return f"GPU {gpu.index}"


def torch_devices(context: Context) -> list[torch.device]:
    """The devices that a check computes on: all CUDA devices, or the processor if the context says so.

    Raises CouldNotRunError if torch is missing, has no CUDA or sees fewer GPUs than the node must have.
    """
    try:
        import torch
    except ImportError:
        hint = "install it with `deploy/install --train`, or name the Python of the training in preflight.python"
        raise CouldNotRunError(f"torch is not installed in {sys.executable}; {hint}") from None
    if context.device == "cpu":
        return [torch.device("cpu")]
    if not torch.cuda.is_available():
        raise CouldNotRunError("torch sees no CUDA device although the node has GPUs; compare with `nvidia-smi`")
    count = torch.cuda.device_count()
    if context.settings.gpus and count < context.settings.gpus:
        reason = f"torch sees {count} of the node's {context.settings.gpus} GPUs"
        raise CouldNotRunError(f"{reason}; check `nvidia-smi` and CUDA_VISIBLE_DEVICES")
    return [torch.device("cuda", index) for index in range(count)]


def device_name(device: torch.device) -> str:
    """The name of a torch device in reports."""
    return "processor" if device.type == "cpu" else f"GPU {device.index}"


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


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
