"""The state of NVIDIA's IMEX daemon, without which GPUs of different nodes share no memory over NVLink.

``nvidia-imex-ctl -q`` prints the state of the daemon of this node (NVIDIA IMEX guide, "IMEX Service Command Service");
the words and their numbers are those of DCGM_FI_IMEX_DAEMON_STATUS in dcgm_fields.h.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from opsd.collectors.base import Metric, NoData, Plugin, Reading, Sample
from opsd.settings.sections import CollectorSettings

CONTROL: Final = Path("/usr/bin/nvidia-imex-ctl")
ASK_S: Final = 30.0
ANSWER_S: Final = 1.5
STATES: Final = (
    "INITIALIZING", "STARTING_AUTH_SERVER", "WAITING_FOR_PEERS", "WAITING_FOR_RECOVERY", "INIT_GPU", "READY",
    "SHUTTING_DOWN", "UNAVAILABLE",
)  # fmt: skip

STATE = Metric(
    "opsd_imex_state",
    "State of the IMEX daemon: 0 initializing, 1 starting its server, 2 waiting for peers, 3 waiting for recovery, "
    "4 initializing GPUs, 5 ready, 6 shutting down, 7 unavailable; none where nvidia-imex-ctl gets no answer.",
)


class ImexSettings(CollectorSettings):
    """The IMEX daemon of racks such as NVL72."""


class ImexCollector:
    """Asks the daemon of this node every 30 s, through the tool at ``control``."""

    name = "imex"
    metrics = (STATE,)
    interval_s = ASK_S

    def __init__(self, control: Path = CONTROL) -> None:
        self._control = control

    def collect(self) -> Reading | NoData:
        """Ask the daemon. Raises ValueError for an answer that is no state."""
        if not self._control.exists():
            return NoData(f"{self._control} is not there")
        code, said = _ask(self._control)
        if code:
            return NoData(f"{self._control.name} -q gets no answer: {said.strip()[:200] or f'exit code {code}'}")
        return Reading((Sample(STATE, parse_state(said)),))


def parse_state(said: str) -> float:
    """The number of the state in the output of ``nvidia-imex-ctl -q``. Raises ValueError."""
    word = said.strip()
    if word not in STATES:
        raise ValueError(f"nvidia-imex-ctl -q prints {word[:100]!r}, which is no state that opsd knows")
    return float(STATES.index(word))


def _ask(control: Path) -> tuple[int, str]:
    """Exit code and output of ``control -q``."""
    done = subprocess.run(
        [control, "-q"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=ANSWER_S,
        encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


COLLECTOR = Plugin("imex", ImexSettings, lambda _settings, _context: ImexCollector(), {})
