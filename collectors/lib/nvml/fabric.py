"""A GPU's place in the NVLink fabric, as its driver has it from the fabric manager. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

REGISTERED: Final = 3
"""The state in which the GPU is part of the fabric (NVML_GPU_FABRIC_STATE_COMPLETED) and its status means something."""

PROBLEMS: Final[Mapping[str, tuple[int, int]]] = {
    "degraded_bandwidth": (0, 0x3),
    "route_recovery": (2, 0x3),
    "route_unhealthy": (4, 0x3),
    "access_timeout_recovery": (6, 0x3),
    "incorrect_configuration": (8, 0xF),
}
"""Shift and mask of each problem in the health mask (NVML_GPU_FABRIC_HEALTH_MASK_* of nvml.h)."""

_UNKNOWN, _FALSE, _CONFIGURED = 0, 2, 1


def fabric_problems(health: int) -> tuple[bool | None, ...]:
    """Whether the GPU has each of ``PROBLEMS``; None where the hardware does not tell, as an H100 for most.

    A problem is 1 and its absence 2, but for the configuration: 1 is a good one and the rest say what is wrong with it.
    """
    answers = []
    for name, (shift, mask) in PROBLEMS.items():
        value = health >> shift & mask
        good = _CONFIGURED if name == "incorrect_configuration" else _FALSE
        answers.append(None if value == _UNKNOWN else value != good)
    return tuple(answers)
