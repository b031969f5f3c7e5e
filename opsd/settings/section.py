"""The base of the configuration's sections."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


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
