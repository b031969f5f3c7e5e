"""What a repair asks of the two services that have the rights over the driver and the tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from opsd.repair.case_file import CaseError, CaseFile
from opsd.repair.machine import RemedyError
from opsd.repair.parts import RemoteDriver, RemoteTests, Verbs, answer, verbs_of_driver, verbs_of_tests
from opsd.repair.repair_plan import NO_HARDWARE
from opsd.repair.retest import Retested

BROKEN = "nvidia-smi --gpu-reset failed: GPU 0 is in use"


class Driver:
    """Its GPUs cannot be reset."""

    def recovery_actions(self) -> Sequence[int]:
        return [2]

    def reset_gpus(self, services: Sequence[str] = ()) -> str:
        raise RemedyError(BROKEN)

    def reload_driver(self, services: Sequence[str] = ()) -> str:
        return "loaded nvidia again"

    def restore(self) -> None:
        raise RemedyError("nothing to start")


class Tests:
    """A node that passes if it is tested for something."""

    __test__ = False

    def __call__(self, checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        return Retested(bool(checks), ",".join(checks))

    def as_spare(self, stop: Callable[[], str]) -> str:
        return "data failed"

    def with_partner(self, hosts: Sequence[str], port: int, stop: Callable[[], str]) -> Retested:
        return Retested(hosts == ["n1", "n2"], f"port {port}")


DRIVER = verbs_of_driver(Driver(), lambda slurm_node: f"/evidence of {slurm_node}")
TESTS = verbs_of_tests(Tests(), str)


@contextmanager
def served(path: Path, reply: Callable[[bytes], bytes]) -> Iterator[Path]:
    """A service at ``path`` that answers each request by ``reply``."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, connection.makefile("rb") as requests:
                    connection.sendall(reply(requests.readline()))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield path
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def by(verbs: Verbs) -> Callable[[bytes], bytes]:
    return lambda line: json.dumps(answer(verbs, json.loads(line))).encode() + b"\n"


def test_a_driver_behind_a_socket_is_a_driver(tmp_path: Path) -> None:
    """With its answers and its reasons; what may be missing is no error."""
    with served(tmp_path / "driver", by(DRIVER)) as path:
        remote = RemoteDriver(path)
        assert (remote.recovery_actions(), remote.reload_driver()) == ([2], "loaded nvidia again")
        with pytest.raises(RemedyError, match=f"^{BROKEN}$"):
            remote.reset_gpus()
        remote.restore()
        assert remote.evidence("NodeName=n1") == "/evidence of NodeName=n1"


def test_tests_behind_a_socket_are_tests(tmp_path: Path) -> None:
    """A node is good only if the service says so in so many words."""
    with served(tmp_path / "test", by(TESTS)) as path:
        remote = RemoteTests(path)
        assert remote(["gpu_burn", "cpu"], str) == Retested(True, "gpu_burn,cpu")
        assert (remote([], str).passed, remote.as_spare(str)) == (False, "data failed")
        assert remote.with_partner(("n1", "n2"), 29_555, str) == Retested(True, "port 29555")


def test_a_test_that_must_end_is_hung_up_on(tmp_path: Path) -> None:
    """The service sees the end of the connection."""
    ended: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "test"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.makefile("rb").readline()
                ended.append(connection.recv(1))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        reasons = iter(["", "a job is on n1"])
        found = RemoteTests(tmp_path / "test", look_s=0.05)(["cpu"], lambda: next(reasons))
        thread.join(10)
    assert found == Retested(False, "the test was stopped: a job is on n1", stopped=True)
    assert ended == [b""]


def test_the_service_ends_its_load_with_the_connection(tmp_path: Path) -> None:
    """Nobody would hear its answer, and the node may be somebody else's."""
    (tmp_path / "opsd.toml").write_text(f'[agent]\nstate_dir = "{tmp_path}"\n')
    asker, ours = socket.socketpair()
    command = [sys.executable, "-P", "-m", "opsd.repair.local", "test", str(tmp_path / "opsd.toml")]
    with asker, ours, subprocess.Popen(command, stdin=ours.fileno(), stdout=subprocess.PIPE, text=True) as service:
        ours.close()
        asker.sendall(b'{"do": "retest", "checks": []}\n')
        asker.close()
        assert service.stdout is not None
        assert "was stopped: nobody waits for it any more" in service.stdout.read()


@pytest.mark.parametrize(
    "said", [b"", b"\n", b"[]\n", b"{}\n", b'{"done": {"passed": 1}}\n', b'{"done": null}\n', b"[" * 9999]
)
def test_a_service_that_ends_or_says_something_odd_has_not_passed_a_node(tmp_path: Path, said: bytes) -> None:
    """Nor has it reset anything."""
    with served(tmp_path / "test", lambda _: said) as path:
        assert RemoteTests(path)(["cpu"], str).passed is False
        assert RemoteDriver(path).recovery_actions() == []
    assert "journalctl -u 'opsd-repair-test@*'" in RemoteTests(tmp_path / "none/test")([], str).detail


@pytest.mark.parametrize("request_", [None, [], "reset_gpus", {}, {"do": ["reset_gpus"]}, {"do": "__class__"}])
def test_only_what_is_on_the_list_is_done(request_: object) -> None:
    """And what is not is told the list."""
    assert answer(DRIVER, request_) == {
        "failed": "a request is one of recovery_actions, reset_gpus, reload_driver, restore, evidence"
    }


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"do": "reboot"}', "a request is one of retest, as_spare, with_partner"),
        ("", "one JSON object"),
        ("[" * 60_000, "one JSON object"),
    ],
    ids=["unknown", "empty", "deep"],
)
def test_the_service_answers_one_line(tmp_path: Path, said: str, told: str) -> None:
    """As systemd starts it, whatever it is asked."""
    (tmp_path / "opsd.toml").write_text("")
    command = [sys.executable, "-P", "-m", "opsd.repair.local", "test", str(tmp_path / "opsd.toml")]
    done = subprocess.run(command, input=f"{said}\n", capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert told in done.stdout
    (tmp_path / "opsd.toml").write_text("[agent]\nnonsense = 1\n")
    done = subprocess.run(command, input=said, capture_output=True, text=True, check=False, timeout=60)
    assert "nonsense" in done.stdout


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"null", b"[" * 100_000, b'{"id": NaN}', b'{"format": 2}', b"\0" * 4096, None]
)
def test_a_record_that_is_none_is_one_sentence_and_stays(tmp_path: Path, content: bytes | None) -> None:
    """Also one that is a folder: it is for a person to move away."""
    file = tmp_path / "repair/case.json"
    file.parent.mkdir()
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(CaseError, match="move it away to begin a new repair"):
        CaseFile(tmp_path).current()
    assert os.path.lexists(file)


def test_a_test_whose_service_is_not_there_says_nothing_of_the_hardware(tmp_path: Path) -> None:
    """It has failed all the same: unknown is not healthy."""
    found = RemoteTests(tmp_path / "test")(["gpu_burn"], str)
    assert (found.passed, found.detail.startswith(NO_HARDWARE)) == (False, True), found
