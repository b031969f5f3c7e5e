"""The ``[cost]`` section of the configuration."""

from __future__ import annotations

from pydantic import Field

from opsd.settings.section import Section


class CostSettings(Section):
    """What GPU time costs, for `opsd report` and the end of a run."""

    gpu_hour: float = Field(
        default=0.0, ge=0, le=1e6, examples=[2.5], description="Price of an hour of one GPU; 0 if it is not known."
    )
    currency: str = Field(default="USD", max_length=8, description="Currency of that price.")
