"""`opsd preflight network` with real processes over gloo: on the loopback interface, and in network namespaces."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread

import pytest

from opsd.ports import free_port
from opsd.preflight.report import Report
from tests.fakes.clock import eventually
from tests.fakes.namespaces import Namespaces, NoNamespacesError

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "opsd.toml").write_text("", encoding="utf-8")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OPSD_", "SLURM_"))}
    return {**clean, "OPSD_STATE_DIR": str(tmp_path / "state"), "OPSD_CONFIG": str(tmp_path / "opsd.toml")}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def node(environment, number: int, rendezvous: str, *options: object, before=()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "opsd", "preflight", "network", "--node", str(number), "--rendezvous", rendezvous]
    return subprocess.Popen(
        [*before, *command, *map(str, options)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def values(report: Report, check: str) -> dict[tuple[str, str], float]:
    (result,) = [result for result in report.results if result.check == check]
    return {(value.measure, value.subject): value.value for value in result.values}


@pytest.mark.long
def test_two_nodes_are_measured_and_searched(environment, port: int, started, tmp_path: Path):
    """Every collective has a bandwidth, every pattern too, and the report has the protocol of the search."""
    target = tmp_path / "report.json"
    for number in (1, 0):
        started.append(node(environment, number, f"127.0.0.1:{port}", "--hosts", "n[0-1]", "--json", target))
    out, err = started[1].communicate(timeout=150)
    assert started[0].wait(timeout=60) == 0
    report = Report.from_json(target.read_bytes())
    assert [result.check for result in report.results] == [
        "network_join", "network_collectives", "network_patterns", "network_search",
    ], out + err  # fmt: skip
    busbw = values(report, "network_collectives")
    assert {measure for measure, _ in busbw if measure.endswith("_busbw")} == {
        f"{name}_busbw"
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
    }
    assert all(value > 0 for value in busbw.values())
    assert len(values(report, "network_patterns")) == 4
    assert values(report, "network_search")["tests", ""] >= 2
    assert next(iter(report.results[-1].facts)) == "speed"


@pytest.mark.long
def test_a_peer_that_never_joins_is_named_and_the_others_go_on(environment, port: int, started, tmp_path: Path):
    """Exit 1 after the time for joining, with what the others measured."""
    target = tmp_path / "report.json"
    options = ("--hosts", "n[0-2]", "--join-timeout", "12", "--search", "--json", target)
    for number in (1, 0):
        started.append(node(environment, number, f"127.0.0.1:{port}", *options))
    out, err = started[1].communicate(timeout=120)
    assert started[1].returncode == 1
    assert "n2 never joined within 12 s" in out, out + err
    assert [r.check for r in Report.from_json(target.read_bytes()).results] == ["network_join", "network_search"]


def connections(port: int) -> int:
    """How many clients the store at ``port`` has; two of them belong to the coordinator itself."""
    tables = (Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_a_member_whose_head_dies_ends(environment, port: int, started):
    """It does not wait for ever: no longer than for a coordinator that has not come, if it was just about to join."""
    for number in (1, 0):
        started.append(node(environment, number, f"127.0.0.1:{port}", "--hosts", "n[0-2]", "--join-timeout", "60"))
    assert eventually(lambda: connections(port) == 3, within_s=60)
    started[1].kill()
    assert started[0].wait(timeout=120) == 1


@pytest.mark.parametrize("answers", ["nothing", "silence", "hanging up"])
def test_without_a_head_there_is_one_sentence_in_time(answers: str, environment, port: int, started):
    """Whoever is at the port: torch's client waits four times as long, for ever for silence, and prints its stack."""
    with ExitStack() as stack:
        if answers != "nothing":
            other = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        if answers == "hanging up":
            Thread(target=hang_up, args=(other,), daemon=True).start()
        member = node(environment, 1, f"127.0.0.1:{port}", "--hosts", "n[0-2]", "--join-timeout", "2")
        started.append(member)
        out, err = member.communicate(timeout=120)
    assert (member.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith(f"opsd: 127.0.0.1:{port}: ")


def hang_up(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            server.accept()[0].close()


def test_ctrl_c_ends_a_search_with_exit_3(environment, port: int, started, tmp_path: Path):
    """What has been measured is in the report."""
    target = tmp_path / "report.json"
    for number in (1, 0):
        started.append(node(environment, number, f"127.0.0.1:{port}", "--hosts", "n[0-1]", "--json", target))
    assert eventually(lambda: connections(port) > 3, within_s=60), "the measuring processes connect as well"
    started[1].send_signal(signal.SIGINT)
    assert started[1].wait(timeout=60) == 3
    assert Report.from_json(target.read_bytes()).interrupted
    assert started[0].wait(timeout=60) == 0


@pytest.mark.long
def test_a_slowed_node_among_four_namespaces_is_named(environment, started, tmp_path: Path):
    """Traffic control takes 30 % of its bandwidth; the others are not blamed."""
    target = tmp_path / "report.json"
    try:
        with Namespaces(4, mbit=100) as cluster:
            cluster.set_speed(2, 70)
            for number in (1, 2, 3, 0):
                options = ("--hosts", "n[0-3]", "--search", "--json", target)
                started.append(node(environment, number, cluster.address(0), *options, before=cluster.command(number)))
            out, err = started[3].communicate(timeout=170)
    except NoNamespacesError as error:
        pytest.skip(str(error))
    found = [f.summary for f in Report.from_json(target.read_bytes()).results[-1].findings if f.verdict == "fail"]
    assert len(found) == 1 and found[0].startswith("node n2 is bad"), out + err
