"""The ``[agent]`` section of the configuration."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from opsd import DISTRIBUTION
from opsd.settings.section import Address, AnyPath, Section


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
