"""Companions under ``opsd launch``: a stand-in for a server of rollouts, killed, hung, refusing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from opsd.launch.run.companions import BUSY_SILENT_S, REFUSED_S, SILENT_S, Answer, Health
from opsd.ports import free_port
from tests.fakes.launched import TRAIN, Launched

SERVER = """
import http.server, os, signal, sys, threading
generation, fault, port, host = int(os.environ.get("STARTS", "1")), sys.argv[1], int(sys.argv[2]), sys.argv[3]
folder = sys.argv[4]
starts = len([name for name in os.listdir(folder) if name.startswith("start-")]) + 1
open(f"{folder}/start-{starts}", "w").write(str(os.getpid()))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        wrong = starts == 1 and os.path.exists(f"{folder}/now")
        if wrong and fault == "hung":
            threading.Event().wait()
        if self.path == "/generate":
            end = __import__("time").monotonic() + 12
            while __import__("time").monotonic() < end:
                pass
        self.send_response(503 if wrong and fault == "refusing" else 200)
        self.end_headers()
        self.wfile.write(b"ok")
        if wrong and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    def log_message(self, *_):
        pass

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

Server((host, port), Handler).serve_forever()
"""


def beside(folder: Path, fault: str, *more: str, host: str = "127.0.0.1") -> tuple[str, ...]:
    (folder / "server.py").write_text(SERVER)
    port = free_port()
    command = f"{sys.executable} {folder}/server.py {fault} {port} {host} {folder}"
    return ("--beside", command, "--beside-health", f"http://127.0.0.1:{port}/health", *more)


RANKS = TRAIN + "\ntrain(100_000, step_s=0.05)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [("killed", "has ended: signal SIGKILL"), ("hung", "hangs: it has not answered"), ("refusing", "answers 503")],
)
def test_a_companion_that_fails_is_named(tmp_path: Path, fault: str, said: str) -> None:
    """Within 30 s the generation starts again, with a new companion, in the same launcher."""
    with Launched(tmp_path, RANKS, *beside(tmp_path, fault)) as run:
        run.until(lambda: run.events("companion_ready"), 60)
        (tmp_path / "now").touch()
        began = time.monotonic()
        run.until(lambda: len(run.events("generation_started")) >= 2, 40)
        assert time.monotonic() - began < 30
        failed = run.events("companion_failed")
        assert len(failed) == 1
        assert said in failed[0]["why"]
        assert f"server.py {fault}" in run.err
        run.until(lambda: len(run.events("companion_ready")) == 2, 30)
        assert (tmp_path / "start-2").exists()
        first = int((tmp_path / "start-1").read_text())
        assert not Path(f"/proc/{first}").exists()
        second = int((tmp_path / "start-2").read_text())
        run.process.terminate()
        assert run.wait(60) in (0, 75)
    assert not Path(f"/proc/{second}").exists()


@pytest.mark.slow
def test_a_companion_that_works_is_no_hang(tmp_path: Path) -> None:
    """A rank waits 12 s for an answer, with a limit of 3 s, and goes on; both end with the run."""
    program = TRAIN + (
        "\nimport sys, urllib.request\n"
        "train(30, step_s=0.05, at=20, do=lambda: urllib.request.urlopen(sys.argv[1]).read())"
    )
    flags = beside(tmp_path, "none", "--hang-limit", "3", "--unannounced-hang-limit", "3")
    url = flags[3].replace("/health", "/generate")
    with Launched(tmp_path, program, *flags, args=(url,)) as run:
        assert run.wait(90) == 0, run.err
        assert not run.events("hang_detected")
        assert len(run.events("generation_started")) == 1
    assert not Path(f"/proc/{int((tmp_path / 'start-1').read_text())}").exists()


def test_a_companion_for_everybody_is_refused(tmp_path: Path) -> None:
    """One that listens on all addresses ends the run at once, with the flag that allows it."""
    with Launched(tmp_path, RANKS, *beside(tmp_path, "none", host="0.0.0.0")) as run:
        assert run.wait(60) == 2
        assert len(run.events("generation_started")) == 1
        reason = run.event("finished")["reason"]
        assert "` listens on all addresses (0.0.0.0:" in reason
        assert "bind it to 127.0.0.1, by --host 127.0.0.1" in reason
        assert "--beside-public" in reason


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--beside", "no-such-program x"), "names no program"),
        (("--beside", "'"), "cannot be split into words"),
        (("--beside", "true", "--beside-health", "ftp://x"), "is no http or https URL"),
        (("--beside-health", "http://127.0.0.1:1"), "there are more --beside-health than --beside"),
    ],
)
def test_a_companion_that_cannot_be(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    """One sentence and code 2, before anything is started."""
    with Launched(tmp_path, "", *flags) as run:
        assert run.wait(30) == 2
        assert said in run.err


GOOD, SILENT, REFUSED, BUSY = Answer(200), Answer(None), Answer(None, refused=True), Answer(503)


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([(GOOD, False, 0), (SILENT, False, SILENT_S - 1)], ""),
        ([(GOOD, False, 0), (SILENT, False, SILENT_S)], "hangs"),
        ([(GOOD, False, 0), (SILENT, True, SILENT_S), (SILENT, True, SILENT_S * 9)], ""),
        ([(GOOD, False, 0), (SILENT, True, BUSY_SILENT_S)], "hangs"),
        ([(GOOD, False, 0), (REFUSED, True, 1), (REFUSED, True, 1 + REFUSED_S)], "refuses connections"),
        ([(GOOD, False, 0), (REFUSED, True, 1), (GOOD, True, 5), (REFUSED, True, 1 + REFUSED_S)], ""),
        ([(GOOD, False, 0), (BUSY, True, 1), (BUSY, True, 1 + REFUSED_S)], "answers 503"),
        ([(REFUSED, True, 99)], ""),
        ([(REFUSED, True, 101)], "refuses connections 1 min 40 s after its start"),
    ],
)
def test_health(answers: list[tuple[Answer, bool, float]], found: str) -> None:
    """Silence is a hang only without work; refusals are none of a server that starts."""
    health, said = Health(100, 0), ""
    for answer, works, now in answers:
        said = health.note(answer, works, now)
    assert said.startswith(found) if found else said == ""
