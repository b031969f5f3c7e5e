"""The state of this node as a spare: one JSON file in the agent's state folder, replaced by rename.

The agent's collector (collectors/spare.py) reads ``ready``, ``expires_at``, ``checked_at`` and ``staged_bytes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from opsd.collectors.spare import FILE
from opsd.files import write_text
from opsd.settings.sections import SpareSettings


@dataclass(frozen=True, slots=True)
class SpareState:
    """``digest`` identifies the staged data; times are epoch seconds, 0 for never.

    ``lacks`` gives by topic (data, software, preflight) why the node is not ready. If it is empty, the node is ready
    until ``expires_at``.
    """

    source: str = ""
    folder: str = ""
    digest: str = ""
    staged_bytes: int = 0
    staged_at: float = 0.0
    verified_at: float = 0.0
    damaged: tuple[str, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    checked_at: float = 0.0
    expires_at: float = 0.0
    ready: bool = False
    lacks: Mapping[str, str] = field(default_factory=dict)
    format: Literal[1] = 1

    def holds_for(self, settings: SpareSettings) -> bool:
        """Whether the state is of the configured source and folder."""
        return (self.source, self.folder) == (settings.source, settings.folder)

    def why_not_ready(self, now: float) -> str:
        """Why the node must not be used as a spare at the epoch second ``now``, "" if it may be."""
        if self.lacks:
            return "; ".join(f"{topic}: {why}" for topic, why in self.lacks.items())
        if not self.ready:
            return "it was never verified; run `opsd spare verify`"
        return "" if now < self.expires_at else "its last verification is too old; run `opsd spare verify`"


_STATE = TypeAdapter(SpareState)


def read(state_dir: Path) -> SpareState | None:
    """The stored state, None if there is none or it cannot be used."""
    try:
        return _STATE.validate_json((state_dir / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def write(state_dir: Path, state: SpareState) -> None:
    """Store ``state``. Raises OSError."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(state_dir / FILE, _STATE.dump_json(state, indent=1).decode() + "\n")


def forget(state_dir: Path) -> None:
    """Remove the state: this node is no spare any more. Raises OSError."""
    (state_dir / FILE).unlink(missing_ok=True)
