"""`opsd top` on a real terminal, and what it draws."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from opsd.agent.loop import Snapshot
from opsd.agent.web import api
from opsd.agent.web.app import App
from opsd.agent.web.server import Server
from opsd.collectors.base import GpuFact, Sample
from opsd.collectors.lib.nvml.series import GPU_TEMP
from opsd.commands.top import screen
from tests.fakes.collectors import SILENT
from tests.fakes.facts import rank
from tests.fakes.incidents import incident

WITHIN_S = 60.0
GPU = GpuFact(2, "GPU-2", "00000000:3A:00.0", "H100", lost=None)


def snapshot() -> Snapshot:
    labels = tuple("GPU-2" if name == "UUID" else "2" for name in GPU_TEMP.labels)
    symptom = incident("symptom", kind="straggler", cause="trouble-1")
    return Snapshot(
        7, time.monotonic(), time.time(), samples=((Sample(GPU_TEMP, 87.0, labels),),),
        incidents=(incident(), symptom), gpus=(GPU,), ranks=(rank(2, phase="backward"),),
    )  # fmt: skip


@pytest.fixture
def address() -> Iterator[str]:
    server = Server("127.0.0.1:0", SILENT)
    server.start(App(snapshot, {"node": "n01", "mode": "act", "started_at": 1.0}, stale_s=5.0))
    yield server.address
    server.close()


class Terminal:
    """A command on a terminal of its own; ``text`` is all that it has written so far."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def wait_for(self, text: str) -> bool:
        deadline = time.monotonic() + WITHIN_S
        while text not in self.text and time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._master, 65_536).decode(errors="replace")
                except OSError:
                    break
        return text in self.text

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def top(address: str) -> Iterator[Terminal]:
    terminal = Terminal(sys.executable, "-m", "opsd", "top", f"--url=http://{address}")
    yield terminal
    terminal.close()


def test_q_ends_it_and_gives_the_terminal_back(top: Terminal) -> None:
    """It is drawn on the alternate screen, which is left again."""
    assert top.wait_for("GPU 0 is in trouble")
    top.press(b"q")
    assert top.wait_for("\x1b[?1049l")
    assert top.process.wait(WITHIN_S) == 0


def test_ctrl_c_ends_it_as_well(top: Terminal) -> None:
    """Without a word and with the same exit code."""
    assert top.wait_for("GPU 0 is in trouble")
    top.process.send_signal(signal.SIGINT)
    assert top.wait_for("\x1b[?1049l")
    assert top.process.wait(WITHIN_S) == 0


def drawn(width: int) -> str:
    """The screen of a terminal that is ``width`` columns wide."""
    at = snapshot()
    status = api.status(at, {"node": "n01", "mode": "act"}, at.at)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(status, api.incident_list(at)["incidents"], at.wall))
    return console.export_text()


def test_it_shows_gpus_ranks_and_incidents_with_their_symptoms() -> None:
    """What a node of this kind has, and a dash for what it does not tell."""
    text = " ".join(drawn(140).split())
    assert "87 °C - -" in text
    assert "2 smol 2 backward" in text
    assert "GPU 0 is in trouble open" in text
    assert text.split()[-1] == "1"


def test_a_gpu_takes_one_line_of_a_narrow_terminal() -> None:
    """On 80 columns the bar gives way; eight GPUs of three lines each would push the incidents off the screen."""
    lines = drawn(80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    title, gpus = lines[0], lines[2 : lines.index("", 2)]
    assert title.startswith("n01")
    assert len(gpus) == 2
    assert gpus[1].startswith("2 ")


def test_without_an_agent_it_says_so() -> None:
    """One sentence and exit code 1."""
    ended = subprocess.run(
        [sys.executable, "-m", "opsd", "top", "--url=http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("opsd: no agent answers at http://127.0.0.1:1")
