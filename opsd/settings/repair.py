"""The ``[repair]`` section of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from opsd.settings.section import Section

RemedyName = Literal["end_processes", "reset_gpus", "reload_driver", "reboot"]


class RepairSettings(Section):
    """How a node that opsd has drained is repaired; whether it is says policy.repair."""

    remedies: tuple[RemedyName, ...] = Field(
        default=("end_processes", "reset_gpus", "reload_driver", "reboot"),
        strict=False,
        description="The remedies that may be used; their order is always this one. A reboot is asked for from Slurm "
        "and needs RebootProgram in slurm.conf.",
    )
    attempts: int = Field(
        default=3, ge=1, le=5, description="A node that is not cured by so many remedies has to be replaced."
    )
    max_per_week: int = Field(
        default=4, ge=1, description="A node that was repaired so often within a week has to be replaced."
    )
    reboot_s: float = Field(default=1800.0, gt=0, description="Seconds in which a node has to be back from a reboot.")
    services: tuple[str, ...] = Field(
        default=("nvidia-persistenced", "nvidia-dcgm", "dcgm", "dcgm-exporter", "nvsm-core", "opsd"),
        strict=False,
        description="Services that hold GPUs open: stopped for a reset, then started again. Of a service with a user "
        "id of 1000 or more that is not named here the processes fail a preflight and are ended, as those of users.",
    )
    pair_partition: str = Field(
        default="",
        description="A node that has passed its test also measures the network with an idle node of this partition, on "
        'which a job of the repair runs meanwhile: one whose jobs give way to all others. With "" it does not.',
    )
