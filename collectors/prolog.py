"""What Slurm's prolog last said of this node, from the file in which ``deploy/slurm/prolog.sh`` leaves its word."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pydantic import Field

from opsd.collectors.base import Metric, NoData, Plugin, Reading, Sample
from opsd.settings.sections import AnyPath, CollectorSettings

WORDS: Final = ("fit", "unfit", "unknown")
_LONGEST: Final = 200

VERDICT = Metric(
    "opsd_prolog_verdict",
    "1 for the word of the last prolog: fit, unfit, or unknown if the node could not be checked and the job started.",
    labels=("verdict",),
)
AGE = Metric("opsd_prolog_age_seconds", "Time since the last prolog.", unit="seconds")

METRICS: Final = (VERDICT, AGE)
LABELS: Final = {"verdict": "fit, unfit or unknown"}


class PrologSettings(CollectorSettings):
    """The last verdict of Slurm's prolog on this node."""

    file: AnyPath = Field(default=Path("/run/opsd-prolog"), description="Where the prolog leaves its word.")


class PrologCollector:
    """The word in ``path``; anything else than a word and a time is unknown."""

    name = "prolog"
    metrics = METRICS
    interval_s = 10.0

    def __init__(self, path: Path, *, wall: Callable[[], float] = time.time) -> None:
        self._path, self._wall = path, wall

    def collect(self) -> Reading | NoData:
        """Read the file."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return NoData("no prolog of opsd has run here since the node booted")
        with open(descriptor, "rb") as file:
            return Reading(parse(file.read(_LONGEST), self._wall()))


def parse(content: bytes, now: float) -> tuple[Sample, ...]:
    """The samples of a word and the epoch second at which it was said, at the epoch second ``now``."""
    word, _, said_at = content.decode("ascii", "replace").strip().partition(" ")
    if word not in WORDS or not said_at.isdecimal():
        word, said_at = "unknown", ""
    verdicts = tuple(Sample(VERDICT, float(word == known), (known,)) for known in WORDS)
    return (*verdicts, Sample(AGE, max(0.0, now - float(said_at)))) if said_at else verdicts


COLLECTOR = Plugin("prolog", PrologSettings, lambda settings, _context: PrologCollector(settings.file), LABELS)
