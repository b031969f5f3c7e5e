"""What hardware does: its data sheets, and the figures that a plan takes where nothing is measured.

The numbers that a plan is made with, each with its source; what a cluster has measured can take their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple, Self


class Figure(NamedTuple):
    """A number and where it is from. ``measured`` on this cluster: then ``file`` has it, of ``date`` (YYYY-MM-DD)."""

    value: float
    unit: str
    source: str
    measured: bool = False
    file: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """All fields are figures."""

    def figures(self) -> dict[str, Figure]:
        """All of them by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def given(self, others: Mapping[str, Figure]) -> Self:
        """With others in place of some; names that are not among its own are left out."""
        return replace(self, **{name: figure for name, figure in others.items() if name in self.figures()})


class Spec(NamedTuple):
    """Dense bf16 and fp8 FLOP/s and memory bandwidth in bytes per second; fp8 is 0 where the GPU has none."""

    bf16: float
    fp8: float
    memory: float


_BY_NAME: Final = (
    ("GH200", Spec(989.4e12, 1978.9e12, 4.0e12)),
    ("H200", Spec(989.4e12, 1978.9e12, 4.8e12)),
    ("H100 PCIe", Spec(756e12, 1513e12, 2.04e12)),
    ("H100 NVL", Spec(835e12, 1671e12, 3.94e12)),
    ("H100", Spec(989.4e12, 1978.9e12, 3.35e12)),
    ("H800", Spec(989.4e12, 1978.9e12, 3.35e12)),
    ("B200", Spec(2250e12, 4500e12, 8.0e12)),
    ("A100-SXM4-80GB", Spec(312e12, 0.0, 2.039e12)),
    ("A100 80GB PCIe", Spec(312e12, 0.0, 1.935e12)),
    ("A100", Spec(312e12, 0.0, 1.555e12)),
    ("L40S", Spec(362e12, 733e12, 0.864e12)),
)


def spec_of(model: str) -> Spec | None:
    """The data sheet of the GPU model ``model``, None if unknown. The first match counts."""
    return next((spec for name, spec in _BY_NAME if name in model), None)


@dataclass(frozen=True, slots=True)
class Parts:
    """All fields are parts in one unit."""

    @property
    def parts(self) -> dict[str, float]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


# Figures of GPUs and networks with their source: data sheets, published measurements, or this cluster's.
#
# Two figures are fitted: the share of the memory's bandwidth that elementwise operations reach, and the share of the
# time of its kernels that a training step reaches as a whole. Everything else that a step loses (gaps between
# kernels, power, the copies of FSDP) is in the second, so that no other figure has to be bent.


@dataclass(frozen=True, slots=True)
class Hardware(Figures):
    """A GPU and the network around it."""

    peak: Figure
    memory: Figure
    gemm: Figure
    attention: Figure
    single: Figure
    bandwidth: Figure
    elementwise: Figure
    loop: Figure
    nvlink: Figure
    network: Figure
    node_latency: Figure
    network_latency: Figure
    spread: Figure
    node_power: Figure
    node_gpus: Figure
    nvlink_gpus: Figure


class _Known(NamedTuple):
    model: str
    gib: float
    gemm: float
    attention: float
    nvlink: float
    network: float
    power: float
    single: float


_GIB: Final = 1 << 30
_KNOWN: Final = {
    "h100": _Known("H100", 79.1, 0.74, 0.279, 365e9, 42e9, 10_200, 67e12),
    "h200": _Known("H200", 139.8, 0.74, 0.279, 365e9, 42e9, 10_200, 67e12),
    "h800": _Known("H800", 79.1, 0.74, 0.279, 160e9, 42e9, 10_200, 67e12),
    "b200": _Known("B200", 178.3, 0.776, 0.127, 730e9, 42e9, 14_300, 75e12),
    "a100": _Known("A100-SXM4-80GB", 79.1, 0.869, 0.514, 235e9, 21e9, 6_500, 19.5e12),
}
GPUS: Final = tuple(_KNOWN)
ELEMENTWISE: Final = 0.502
"""Of the memory's bandwidth: with ``FITTED`` two unknowns for two speeds, compiled and not."""
FITTED: Final = {"h100": 0.828, "a100": 0.825}
"""See ``tests/unit/test_plan.py``."""

_SOURCES: Final[Mapping[str, Mapping[str, str]]] = {
    "gemm": {
        "h100": "730 of 989 TFLOP/s sustained by large bf16 products (preflight's gpu_burn)",
        "b200": "1,745 of 2,250 TFLOP/s, the most of any shape (ml-engineering, MAMF finder)",
        "a100": "271 of 312 TFLOP/s, the most of any shape (ml-engineering, MAMF finder)",
    },
    "attention": {
        "h100": "FlashAttention-2: 333 TFLOP/s forward, 318 backward; heads of 128, 8,192 tokens (arXiv 2407.08608)",
        "b200": "FlashAttention-2: 333 TFLOP/s in both passes, heads of 64 (Dao-AILab/flash-attention issue 1589)",
        "a100": "FlashAttention-2: 60 % of the peak in both passes (arXiv 2307.08691, section 4.1)",
    },
    "elementwise": {
        "h100": "fitted to torchtitan: Llama 3 8B on 8 H100 with 500 W, 5,762 tokens/s each, 6,667 compiled",
    },
    "loop": {
        "h100": "fitted to torchtitan: 5,762 tokens/s of Llama 3 8B on each of 8 H100 with 500 W, 6,667 compiled",
        "a100": "fitted to torchtitan: 2,973 tokens/s of Llama 3 8B on each of 64 A100 (docs/performance.md, 2024)",
    },
    "nvlink": {
        "h100": "365 GB/s between two GPUs of a node (SmolLM training playbook)",
        "h800": "160 GB/s (DeepSeek-V3, arXiv 2412.19437, 3.2.2)",
        "b200": "twice an H100's, as in the data sheets",
        "a100": "235 GB/s, the bus bandwidth of a ring over NVLink 3 (nccl-tests)",
    },
    "network": {
        "h100": "42 GB/s of a 400 Gbit/s port for each GPU (SmolLM training playbook)",
        "a100": "the same share of a 200 Gbit/s port for each GPU",
    },
}


def is_kind(gpu: str, model: str) -> bool:
    """Whether ``model``, as the driver names a GPU, is the one of ``GPUS``."""
    return _KNOWN[gpu].model in model


def kind_of(model: str) -> str | None:
    """The one of ``GPUS`` that ``model`` is, as the driver names it, None if it is none of them."""
    return next((gpu for gpu in GPUS if is_kind(gpu, model)), None)


def hardware_of(gpu: str, dtype: str = "bfloat16") -> Hardware:
    """The defaults of one of ``GPUS`` that computes in ``dtype``."""
    known = _KNOWN[gpu]
    spec = spec_of(known.model)
    assert spec is not None

    def source(name: str) -> str:
        own = _SOURCES[name]
        return own.get(gpu) or f"taken to be an H100's: {own['h100']}"

    return Hardware(
        peak=Figure(spec.bf16, "FLOP/s", f"data sheet of the {known.model}, dense bf16")
        if dtype == "bfloat16"
        else Figure(known.single, "FLOP/s", f"data sheet of the {known.model}, float32 without tensor cores"),
        memory=Figure(known.gib * _GIB, "bytes", "what torch reports as the capacity of such a GPU"),
        gemm=Figure(known.gemm, "share of peak", source("gemm")),
        attention=Figure(known.attention, "share of peak", source("attention")),
        single=Figure(known.single, "FLOP/s", f"data sheet of the {known.model}, float32 without tensor cores"),
        bandwidth=Figure(0.87 * spec.memory, "bytes/s", "87 % of the data sheet, as 2.9 of 3.35 TB/s (playbook)"),
        elementwise=Figure(ELEMENTWISE, "share of bandwidth", source("elementwise")),
        loop=Figure(FITTED.get(gpu, FITTED["h100"]), "share", source("loop")),
        nvlink=Figure(known.nvlink, "bytes/s", source("nvlink")),
        network=Figure(known.network, "bytes/s per GPU", source("network")),
        node_latency=Figure(12.9e-6, "s", "an all-reduce in a node of 8 H100 (SmolLM training playbook)"),
        network_latency=Figure(55.5e-6, "s", "for each doubling of the nodes: 235 µs on 16 (playbook)"),
        spread=Figure(0.05, "share", "GPUs of a node differ by 5 %, and steps wait for the slowest (playbook)"),
        node_power=Figure(known.power, "W", "maximum of a DGX with 8 of them (data sheet); cooling is not in it"),
        node_gpus=Figure(8, "GPUs", "HGX boards"),
        nvlink_gpus=Figure(8, "GPUs", "an NVLink domain: an HGX board; 72 with NVL72, or as many as jobs use of them"),
    )
