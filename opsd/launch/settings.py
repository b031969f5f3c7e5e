"""What the command line of ``opsd launch`` settles, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from opsd.launch.program import Program


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds throughout. ``shown`` are the local ranks whose output also goes to the console."""

    program: Program
    run: str
    job: str
    node: str
    local_size: int
    run_id: str
    role: str = "default"
    max_restarts: int = 8
    same_failures: int = 3
    refill_steps: int = 100
    standby: bool = True
    standby_imports: tuple[str, ...] = ()
    stop_timeout_s: float = 120.0
    shown: frozenset[int] = field(default_factory=frozenset)
    events_file: Path | None = None
