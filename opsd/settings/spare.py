"""The ``[spare]`` section of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from opsd.settings.section import CollectorSettings


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
