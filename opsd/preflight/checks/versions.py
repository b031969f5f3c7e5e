"""Versions of everything below the training program: they must not change unnoticed, nor differ between nodes.

Packages are not imported to read their version, so the check takes milliseconds. `opsd preflight merge` names the nodes
that differ from the majority.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from opsd.preflight.base import Check, Context, Measure, Measurement, Outcome, Progress

_PACKAGES: Final = ("torch", "triton", "transformer-engine", "flash-attn", "numpy")
_NCCL: Final = re.compile(r"nvidia-nccl(-cu\d+)?")
_PROGRAMS: Final[Mapping[str, Sequence[str]]] = {
    "Slurm": ("slurmd", "-V"),
    "enroot": ("enroot", "version"),
    "Apptainer": ("apptainer", "--version"),
    "Docker": ("docker", "--version"),
    "NVIDIA container toolkit": ("nvidia-ctk", "--version"),
}
_IMAGES: Final = ("SLURM_CONTAINER", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "NVIDIA_BUILD_ID")
_CUDA: Final = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")


def run(context: Context, progress: Progress) -> Outcome:
    """Collect the versions that are present."""
    facts = {
        "kernel": os.uname().release,
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        **dict(_packages()),
        **dict(_driver(Path(context.proc, "driver/nvidia/version"))),
        **dict(_modules(Path(context.sys))),
        **dict(_firmware(Path(context.sys))),
        **dict(_system(Path("/etc/os-release"))),
        **dict(_programs()),
        **dict(_image(os.environ)),
    }
    return Outcome((Measurement("known", len(facts)),), facts=facts)


def _packages() -> Iterator[tuple[str, str]]:
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        if name in _PACKAGES:
            yield name, distribution.version
        elif _NCCL.fullmatch(name):
            yield "NCCL", distribution.version
        elif _CUDA.fullmatch(name):
            yield "CUDA runtime", distribution.version


def _driver(path: Path) -> Iterator[tuple[str, str]]:
    """The loaded NVIDIA kernel module, from "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  …"."""
    if path.exists():
        match = re.search(r"(Open )?Kernel Module.*?\s(\d+\.\d+(\.\d+)?)\s", path.read_text(encoding="utf-8"))
        if match:
            yield "NVIDIA driver", match[2] + (" (open)" if match[1] else "")


def _modules(sys: Path) -> Iterator[tuple[str, str]]:
    for name in ("mlx5_core", "nvidia_peermem", "gdrdrv", "lustre", "efa"):
        if (path := sys / f"module/{name}/version").exists():
            yield name, path.read_text(encoding="ascii").strip()


def _firmware(sys: Path) -> Iterator[tuple[str, str]]:
    versions = {}
    for path in sorted(sys.glob("class/infiniband/*/fw_ver")):
        versions[path.parent.name] = path.read_text(encoding="ascii").strip()
    if versions:
        distinct = sorted({*versions.values()})
        yield "NIC firmware", ", ".join(distinct)


def _system(os_release: Path) -> Iterator[tuple[str, str]]:
    if os_release.exists():
        match = re.search(r'^PRETTY_NAME="?([^"\n]+)', os_release.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            yield "system", match[1]


def _programs() -> Iterator[tuple[str, str]]:
    """Slurm and the container runtime, from their own version output."""
    for name, command in _PROGRAMS.items():
        if shutil.which(command[0]):
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
            if match := re.search(r"\d+\.\d+[\w.+~-]*", answer):
                yield name, match[0]


def _image(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The container image that this runs in, by the variables of Slurm, Apptainer, and NVIDIA's images."""
    if image := next((environ[name] for name in _IMAGES if environ.get(name)), ""):
        yield "container image", image


CHECK = Check(
    name="versions",
    title="Versions of driver, kernel and libraries",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in", "spare"), 1),
    measures=(Measure("known", "", "number of versions found"),),
    stable=True,
)
