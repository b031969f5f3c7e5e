"""The ``[preflight]`` section of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from opsd.settings.section import Section

_URL = r"^$|^https?://[^\s/@?#]+(/[^\s?#]*)?$"


class PreflightSettings(Section):
    """Checks of a node before a run. `opsd preflight --train CONFIG` knows better what the run needs of a node."""

    optional: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=[("storage_local",)],
        description="Checks whose inability to run does not fail the node; names are those of `opsd preflight list`.",
    )
    skip: tuple[str, ...] = Field(
        default=(), strict=False, examples=[("cpu",)], description="Checks that are never run on this node."
    )
    python: str = Field(
        default="",
        pattern=r"^$|^/",
        examples=["/opt/train/bin/python"],
        description="Python in which checks that need torch run, by default opsd's own; it must have the same opsd. "
        "Where preflight is run as root, nobody else may be able to write there.",
    )
    limits: Mapping[str, Mapping[str, float]] = Field(
        default_factory=dict,
        examples=[{"gpu_burn": {"throughput": 650e12}}],
        description="Values, in base units, at which a measure of a check fails, instead of the check's own.",
    )
    gpus: int | None = Field(default=None, ge=0, examples=[8], description="How many GPUs the node must have.")
    infiniband_gbps: float | None = Field(
        default=None, gt=0, examples=[400.0], description="Rate in Gbit/s that every port must have."
    )
    local_dir: str = Field(default="", examples=["/scratch"], description="Folder on local NVMe of the run.")
    shared_dir: str = Field(default="", examples=["/fsx"], description="Folder on shared storage of the run.")
    fleet: str = Field(
        default="",
        examples=["/fsx/opsd/fleet.json"],
        description="File written by `opsd preflight merge` whose medians are a further yardstick.",
    )
    alertmanager: str = Field(
        default="",
        pattern=_URL,
        examples=["http://monitoring:9093"],
        description="Alertmanager through which `opsd preflight --alerts` fires every alert once.",
    )
    prometheus: str = Field(
        default="",
        pattern=_URL,
        examples=["http://monitoring:9090"],
        description="Prometheus that has the alerts of opsd loaded.",
    )
    alert_inbox: str = Field(
        default="",
        pattern=r"^$|:\d{1,5}$",
        examples=["127.0.0.1:9478"],
        description="Address on this node to which a webhook of Alertmanager posts; each test alert must arrive once.",
    )
    tokens_per_s: float | None = Field(
        default=None, gt=0, examples=[50000.0], description="Tokens per second that the run consumes on one node."
    )
    checkpoint_bytes: float | None = Field(
        default=None, gt=0, examples=[37e9], description="Bytes of a checkpoint that one node writes."
    )
    checkpoint_interval_s: float | None = Field(
        default=None, gt=0, examples=[7200.0], description="Seconds between two checkpoints."
    )
