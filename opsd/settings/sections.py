"""What sections of the configuration are made of, and those that are no collector's but for the policy's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from opsd import DISTRIBUTION


class Section(BaseModel):
    """Frozen, and strict: unknown keys and values of another type are refused.

    The first line of the docstring and the descriptions of the fields are what the reference says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class CollectorSettings(Section):
    """The section of a collector."""

    enabled: bool = Field(default=True, description="Whether this is collected.")


def _is_address(text: str) -> str:
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]\s]+):\d{1,5}", text) or int(text.rpartition(":")[2]) > 65_535:
        raise ValueError("should be ADDRESS:PORT, for instance 127.0.0.1:9477 or [::1]:9477")
    return text


def _is_local_url(text: str) -> str:
    if not re.fullmatch(r"http://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d{1,5})?/[^\s?#]*", text):
        raise ValueError("should be http:// on this node, for instance http://localhost:9400/metrics")
    return text


def _is_web_url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", text):
        raise ValueError("should be http:// or https:// and a host, for instance https://grafana.example.com")
    return text


AnyPath = Annotated[Path, Field(strict=False)]
Address = Annotated[str, AfterValidator(_is_address)]
LocalUrl = Annotated[str, AfterValidator(_is_local_url)]
WebUrl = Annotated[str, AfterValidator(_is_web_url)]


def default_state_dir() -> Path:
    """``/var/lib/opsd`` for root, ``$XDG_STATE_HOME/opsd`` (``~/.local/state/opsd``) for everybody else."""
    if os.geteuid() == 0:
        return Path("/var/lib/opsd")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "opsd"


class AgentSettings(Section):
    """The node agent."""

    listen: Address = Field(
        default="127.0.0.1:9477",
        description="Address and port of /metrics and the API. Everybody who reaches it can read it.",
    )
    names: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=[("node-17.cluster.example",)],
        description="More names under which others reach this agent over plain HTTP. It also answers to addresses and "
        "the node's own names, and refuses all others, so that no web page reads it through a browser.",
    )
    web_config: AnyPath | None = Field(
        default=None,
        examples=["/etc/opsd/web.yml"],
        description="File with certificate and passwords in the format of Prometheus' exporters "
        f"({DISTRIBUTION}[web]).",
    )
    peer_ca_file: AnyPath | None = Field(
        default=None,
        examples=["/etc/opsd/ca.crt"],
        description="Certificates to trust when the page of a job asks the agents of its other nodes over TLS. Where "
        "web_config asks clients for a certificate, agents and commands on a node show the one in it to others.",
    )
    peer_credentials_file: AnyPath | None = Field(
        default=None,
        examples=["/etc/opsd/peer-credentials"],
        description="File with USER:PASSWORD that these agents ask for. Used only with agent.web_config.",
    )
    job_label: bool = Field(
        default=False,
        description="Give the DCGM_* series of a GPU the label hpc_job with its job, as dcgm-exporter does where jobs "
        "are mapped, for boards that expect it. Each new job is then a new series.",
    )
    run_seconds: bool = Field(
        default=False,
        description="Export opsd_run_seconds_total, the ledger of each run whose rank 0 is here, for the goodput "
        "board. It is computed again every minute or more, in a process that takes 2 % of a core at most.",
    )
    interval_s: float = Field(default=1.0, ge=0.05, le=60, description="Seconds between two collections.")
    deadline_s: float = Field(
        default=2.0, gt=0, le=300, description="A collector that takes longer is marked as hung and its series vanish."
    )
    window_s: float = Field(
        default=600.0, ge=10, le=86_400, description="How much past the runbooks can look at, in seconds."
    )
    state_dir: AnyPath = Field(
        default_factory=default_state_dir,
        examples=["/var/lib/opsd"],
        description="Folder of the journal. By default /var/lib/opsd for root and ~/.local/state/opsd for others; "
        "OPSD_STATE_DIR wins.",
    )
    node: str = Field(
        default_factory=lambda: os.uname().nodename,
        min_length=1,
        examples=["node-0017"],
        description="Name of this node, if it is not the host name.",
    )


class NotifySettings(Section):
    """Telling people."""

    webhook: SecretStr | None = Field(
        default=None,
        examples=["https://hooks.example.com/services/..."],
        description="URL that is told of every incident opened, escalated or resolved. A webhook gets a JSON object, "
        "and Slack, Discord and Teams their own form. apprise delivers to all others, such as mailtos:// and "
        f"pagerduty:// ({DISTRIBUTION}[notify]). The URL is a secret, so webhook_file suits this file better.",
    )
    webhook_file: AnyPath | None = Field(
        default=None,
        examples=["/etc/opsd/webhook"],
        description="File with such URLs, one a line, instead of it.",
    )
    grafana_url: WebUrl | None = Field(
        default=None,
        examples=["https://grafana.example.com"],
        description="Grafana into which incidents and actions are written as annotations.",
    )
    grafana_token_file: AnyPath = Field(
        default=Path("/etc/opsd/grafana-token"),
        description="File with the token of a Grafana service account that may write annotations.",
    )

    @property
    def receiver(self) -> str | Path | None:
        """The URL to post to, or the file that has it; None without notifications."""
        return self.webhook_file or (self.webhook.get_secret_value() if self.webhook else None)


class CostSettings(Section):
    """What GPU time costs, for `opsd report` and the end of a run."""

    gpu_hour: float = Field(
        default=0.0, ge=0, le=1e6, examples=[2.5], description="Price of an hour of one GPU; 0 if it is not known."
    )
    currency: str = Field(default="USD", max_length=8, description="Currency of that price.")


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


class SpareSettings(CollectorSettings):
    """Nodes kept ready to take the place of another one, and whether this one is."""

    source: str = Field(
        default="",
        examples=["s3://datasets/smollm3"],
        description="Folder or URL with the token shards that spares must have, with a folder per source of a mixture; "
        "the web server of a node that has them (python -m http.server) is one too, with spare.digest.",
    )
    digest: str = Field(
        default="",
        pattern=r"^(sha256:[0-9a-f]{64})?$",
        examples=["sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"],
        description="What `opsd spare digest` prints for the data of the run; only this data is staged then. "
        "Needed for a source at http:// or ftp://, where anybody on the network may answer.",
    )
    folder: str = Field(
        default="", examples=["/scratch/shards"], description="Folder on local NVMe into which they are copied."
    )
    rate_mb_s: float | None = Field(
        default=None, gt=0, examples=[500.0], description="Copy and verify at most this fast, in MB/s; else unlimited."
    )
    parallel: int = Field(default=8, ge=1, le=64, description="Files that are copied or read at once.")
    software: Mapping[str, str] = Field(
        default_factory=dict,
        examples=[{"torch": "2.9", "NVIDIA driver": "580.65.06"}],
        description="Versions that a spare must have, or their beginnings; names as in `opsd spare verify`.",
    )
    max_age_s: float = Field(
        default=86_400.0, gt=0, description="A spare verified longer ago than this is not used until it is again."
    )
    reservation: str = Field(
        default="opsd_spares",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$",
        description="Name of the pool's reservation in Slurm.",
    )
