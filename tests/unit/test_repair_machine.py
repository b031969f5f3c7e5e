"""What a repair does on the node, and asks of its two services."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from opsd.collectors.lib.processes import DEAD, process_letter
from opsd.repair.case_file import CaseError, CaseFile
from opsd.repair.driver import NvidiaDriver
from opsd.repair.machine import SAID_BYTES, NodeMachine, RemedyError, run_command
from opsd.repair.parts import RemoteDriver, RemoteTests, Verbs, answer, verbs_of_driver, verbs_of_tests
from opsd.repair.repair_plan import NO_HARDWARE
from opsd.repair.retest import Retested
from opsd.settings.sections import RepairSettings
from tests.fakes.clock import until
from tests.fakes.nvml import gpu_device

# What a repair does on the node: which processes end, and what is stopped meanwhile.


@dataclass
class Node:
    """A node's /proc and its commands. ``active`` services run, ``broken`` commands fail; one may take another down."""

    proc: Path
    active: set[str] = field(default_factory=set)
    broken: tuple[str, ...] = ()
    ran: list[str] = field(default_factory=list)
    killed: list[tuple[int, int]] = field(default_factory=list)
    enabled: set[str] = field(default_factory=set)
    given_s: list[float] = field(default_factory=list)
    dynamic: tuple[str, ...] = ()
    persistence: str = "[N/A]"
    follows: Mapping[str, str] = field(default_factory=dict)
    stubborn: bool = False
    restarts: bool = False
    now: float = 0.0

    def run(self, argv: Sequence[str], deadline_s: float) -> str:
        command = " ".join(argv)
        self.given_s.append(deadline_s)
        if argv[1:2] == ["show"]:
            return "yes\n" if argv[-1] in self.dynamic else "no\n"
        if argv[0] == "systemctl" and argv[1].startswith("is-"):
            if argv[-1] not in (self.active if argv[1] == "is-active" else self.enabled):
                raise RemedyError("inactive")
            return ""
        if argv[1:2] == ["--query-gpu=persistence_mode"]:
            return f"{self.persistence}\n" * 8
        self.ran.append(command)
        if argv[1:2] == ["stop"]:
            self.active -= {argv[-1], self.follows.get(argv[-1], "")}
        if command.startswith(self.broken or ("never",)):
            raise RemedyError(f"{command} failed: in use")
        return ""

    def kill(self, pid: int, number: int) -> None:
        self.killed.append((pid, number))
        if self.restarts:
            return
        if not self.stubborn or number == signal.SIGKILL:
            (self.proc / str(pid) / "fd/3").unlink()

    def holds(self, pid: int, cgroup: str, uid: int = 0) -> None:
        """A process of the cgroup and the user that has a GPU open."""
        (self.proc / str(pid) / "fd").mkdir(parents=True)
        (self.proc / str(pid) / "fd/3").symlink_to(gpu_device(self.proc))
        (self.proc / str(pid) / "comm").write_text("python\n")
        (self.proc / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
        (self.proc / str(pid) / "status").write_text(f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")

    def started(self, pid: int, seconds_ago: float) -> None:
        ticks = (time.clock_gettime(time.CLOCK_BOOTTIME) - seconds_ago) * os.sysconf("SC_CLK_TCK")
        (self.proc / str(pid) / "stat").write_text(f"{pid} (python) S {' '.join(['0'] * 18)} {ticks:.0f} 0\n")

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def machine(self, *services: str) -> NodeMachine:
        driver = NvidiaDriver(ask=False, services=services, run=self.run, proc=self.proc, sleep=self.sleep)
        return NodeMachine(driver, services, proc=self.proc, kill=self.kill, clock=lambda: self.now, sleep=self.sleep)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "proc").mkdir()
    return Node(tmp_path / "proc")


def test_what_jobs_have_left_is_ended_and_services_are_not(node: Node) -> None:
    """A step of Slurm's that root has run counts as a job's; one that ignores SIGTERM is killed."""
    node.stubborn = True
    node.holds(1, "/init.scope")
    node.holds(101, "/system.slice/nvidia-persistenced.service")
    node.holds(102, "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0")
    node.holds(103, "/user.slice/user-1000.slice/session-1.scope")
    assert node.machine().end_processes() == "ended 2 processes"
    assert {pid for pid, _ in node.killed} == {102, 103}
    assert (102, signal.SIGTERM) in node.killed
    assert (102, signal.SIGKILL) in node.killed


def test_a_container_of_root_s_is_ended_as_a_job_is(node: Node) -> None:
    """Docker's are scopes beside the services; a job's process in slurmd's group is no service either."""
    node.holds(101, "/system.slice/docker-8f1c.scope")
    node.holds(102, "/system.slice/docker-8f1c.scope/system.slice/inner.service")
    node.holds(103, "/system.slice/slurmd.service", uid=1007)
    node.holds(104, "/system.slice/system-exporter.slice/exporter@0.service")
    assert node.machine().end_processes() == "ended 3 processes"
    assert {pid for pid, _ in node.killed} == {101, 102, 103}


@pytest.mark.parametrize("mark", [":", "\r", "\v", ":\r0::"])
def test_a_user_s_group_that_is_named_like_a_service_is_none(node: Node, mark: str) -> None:
    """Users name the groups below their own, and a set-user-id program of theirs has its folder in /proc from root."""
    own = f"/user.slice/user-1007.slice/user@1007.service/x{mark}"
    node.holds(101, f"{own}/system.slice/nvidia-persistenced.service", uid=1007)
    node.holds(102, f"{own}/system.slice/gpu-exporter.service", uid=1007)
    node.holds(103, "/system.slice/slurmd.service", uid=1007)
    assert node.machine("gpu-exporter").end_processes() == "ended 3 processes"


def test_a_service_with_a_dynamic_user_is_stopped_for_a_reset_and_not_killed(node: Node) -> None:
    """Killed, it would be started again by systemd at once, while the GPUs are reset."""
    node.holds(101, "/system.slice/gpu-exporter.service", uid=64000)
    assert node.machine().end_processes() == "no process holds a GPU"
    node.active, node.dynamic = {"gpu-exporter.service", "sshd.service"}, ("gpu-exporter.service",)
    node.machine().reset_gpus()
    stop, start = (f"systemctl {do} gpu-exporter.service" for do in ("stop", "start"))
    assert (node.ran, node.killed) == ([stop, "nvidia-smi --gpu-reset", start], [])
    node.ran = []
    NvidiaDriver(ask=False, run=node.run, proc=node.proc).reset_gpus(["sshd.service"])
    assert node.ran == ["nvidia-smi --gpu-reset"]


def test_a_service_of_an_ordinary_user_id_that_the_settings_name_is_not_killed(node: Node) -> None:
    """As an exporter of the site's own; of others, and of names within other groups, it is not known."""
    node.holds(101, "/system.slice/gpu-exporter.service", uid=1001)
    node.holds(102, "/system.slice/gpu-agent.service", uid=1001)
    node.holds(103, "/user.slice/user-1001.slice/user@1001.service/app.slice/gpu-exporter.service", uid=1001)
    assert node.machine("gpu-exporter", "gpu-agent.service").end_processes() == "ended 1 process"
    assert {pid for pid, _ in node.killed} == {103}
    node.restarts = True
    with pytest.raises(RemedyError, match=r"do not end: 101 \(gpu-exporter.service\), 102 \(gpu-agent.service\)$"):
        node.machine().end_processes()


def test_a_job_that_has_begun_since_is_left_alone(node: Node) -> None:
    """Somebody has resumed the node while a remedy was ending what an earlier job had left."""
    job = "/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0"
    node.holds(101, job.format(7))
    node.started(101, seconds_ago=600)
    node.stubborn = True

    def resumed(seconds: float) -> None:
        if not node.now:
            node.holds(102, job.format(8))
            node.started(102, seconds_ago=-5)
        node.sleep(seconds)

    machine = NodeMachine(
        NvidiaDriver(ask=False, run=node.run), proc=node.proc, kill=node.kill, clock=lambda: node.now, sleep=resumed
    )
    with pytest.raises(RemedyError, match="process 102 of job 8 has begun meanwhile"):
        machine.end_processes()
    assert 102 not in {pid for pid, _ in node.killed}


def test_services_that_hold_gpus_are_stopped_for_a_reset(node: Node) -> None:
    """Those that ran, which are started again, also when the reset fails."""
    node.active, node.broken = {"nvidia-dcgm"}, ("nvidia-smi",)
    with pytest.raises(RemedyError, match="in use"):
        node.machine("nvidia-dcgm", "dcgm-exporter").reset_gpus()
    reset = "nvidia-smi --gpu-reset"
    assert [one for one in node.ran if one != reset] == ["systemctl stop nvidia-dcgm", "systemctl start nvidia-dcgm"]


def test_a_reset_that_meets_somebody_who_looks_is_tried_again(node: Node) -> None:
    """A health check has a GPU open for a second; what stays is refused three times, another failure once."""
    reset = "nvidia-smi --gpu-reset"
    for refusals, why, tries in ((2, "in use", 3), (9, "1 device is currently being used", 3), (9, "GPU is lost", 1)):
        left, node.ran = refusals, []

        def run(argv: Sequence[str], deadline_s: float, why: str = why) -> str:
            nonlocal left
            said = node.run(argv, deadline_s)
            if " ".join(argv) == reset and left:
                left -= 1
                raise RemedyError(f"{reset} failed: {why}")
            return said

        driver = NvidiaDriver(ask=False, run=run, proc=node.proc, sleep=node.sleep)
        with suppress(RemedyError):
            assert (driver.reset_gpus(), refusals) == ("reset all GPUs", 2)
        assert node.ran == [reset] * tries


def test_a_service_that_another_takes_down_is_started_again(node: Node) -> None:
    """An exporter that requires DCGM's service: it was seen stopped already, and stayed so."""
    node.active, node.follows = {"nvidia-dcgm", "dcgm-exporter"}, {"nvidia-dcgm": "dcgm-exporter"}
    node.machine("nvidia-dcgm", "dcgm-exporter").reset_gpus()
    assert node.ran[-2:] == ["systemctl start dcgm-exporter", "systemctl start nvidia-dcgm"]


def test_persistence_mode_is_on_again_after_a_reset_and_a_reload(node: Node) -> None:
    """Also one that has failed; where it was off, and where no GPU says, nothing is switched."""
    (node.proc / "modules").write_text("nvidia 1 1 - Live\n")
    node.active = {"nvidia-persistenced"}
    for modes, broken in (("Enabled", ()), ("Enabled", ("nvidia-smi --gpu-reset",)), ("Disabled", ()), ("[N/A]", ())):
        node.ran, node.persistence, node.broken = [], modes, broken
        with suppress(RemedyError):
            node.machine("nvidia-persistenced").reset_gpus()
        assert (node.ran[-1] == "nvidia-smi --persistence-mode=1") is (modes == "Enabled"), modes
    node.ran, node.persistence, node.active = [], "Enabled", {"nvidia-persistenced"}
    node.machine("nvidia-persistenced").reload_driver()
    assert node.ran[-2:] == ["systemctl start nvidia-persistenced", "nvidia-smi --persistence-mode=1"]


def test_a_reset_that_is_refused_names_the_services_that_hold_a_gpu(node: Node) -> None:
    """The driver says that somebody does, and not who; the fabric manager may."""
    node.holds(101, "/system.slice/nvsm-core.service")
    node.holds(102, "/system.slice/nvidia-fabricmanager.service")
    node.holds(103, "/system.slice/nvidia-dcgm.service")
    assert node.machine("nvidia-dcgm").reset_gpus() == "reset all GPUs"
    node.broken = ("nvidia-smi --gpu-reset",)
    with pytest.raises(RemedyError, match=r"in use; 101 \(nvsm-core.service\) held a GPU: name the service in repair"):
        node.machine("nvidia-dcgm").reset_gpus()


def test_the_driver_s_modules_are_unloaded_in_order_and_loaded_again(node: Node) -> None:
    """Also where one of them is in use; those that were not loaded stay so."""
    (node.proc / "modules").write_text("nvidia_uvm 1 0 - Live\nnvidia 1 1 nvidia_uvm, Live\next4 1 1 - Live\n")
    assert node.machine().reload_driver() == "loaded nvidia, nvidia_uvm again"
    load = ["modprobe nvidia", "modprobe nvidia_uvm"]
    assert node.ran == ["modprobe --remove nvidia_uvm", "modprobe --remove nvidia", *load]
    node.ran, node.broken = [], ("modprobe --remove nvidia_uvm",)
    with pytest.raises(RemedyError, match="in use"):
        node.machine().reload_driver()
    assert node.ran == ["modprobe --remove nvidia_uvm", *load]


def test_modules_of_others_that_use_the_driver_are_unloaded_before_it(node: Node) -> None:
    """GDRCopy and GPUDirect Storage: with them the driver's own module stays in use."""
    (node.proc / "modules").write_text(
        "gdrdrv 36864 0 - Live 0x0 (OE)\n"
        "nvidia_fs 323584 0 - Live 0x0 (OE)\n"
        "nvidia_drm 131072 0 - Live 0x0 (POE)\n"
        "nvidia_modeset 1724416 1 nvidia_drm, Live 0x0 (POE)\n"
        "drm_kms_helper 315392 1 nvidia_drm, Live 0x0\n"
        "nvidia 9695232 2 gdrdrv,nvidia_fs,nvidia_modeset,[permanent], Live 0x0 (POE)\n"
    )
    node.machine().reload_driver()
    order = [command.split()[-1] for command in node.ran if "--remove" in command]
    assert order == ["gdrdrv", "nvidia_fs", "nvidia_drm", "nvidia_modeset", "nvidia"]
    assert [command.split()[-1] for command in node.ran if "--remove" not in command] == order[::-1]


def test_a_fabric_manager_that_had_failed_is_started_with_the_driver(node: Node) -> None:
    """Stopped for the driver if it runs, and untouched by a reset, which may need it."""
    (node.proc / "modules").write_text("nvidia 1 1 - Live\n")
    start = "systemctl start nvidia-fabricmanager"
    node.enabled = {"nvidia-fabricmanager"}
    node.machine().reload_driver()
    assert node.ran[-1] == start
    node.ran, node.active = [], {"nvidia-fabricmanager", "nvidia-persistenced"}
    node.machine("nvidia-persistenced").reload_driver()
    assert node.ran[0:2] == ["systemctl stop nvidia-persistenced", "systemctl stop nvidia-fabricmanager"]
    assert {start, "systemctl start nvidia-persistenced"} <= set(node.ran[4:])
    node.ran, node.active = [], {"nvidia-imex", "nvidia-persistenced"}
    node.machine("nvidia-persistenced").reload_driver()
    assert (node.ran[1], node.ran.count("systemctl start nvidia-imex")) == ("systemctl stop nvidia-imex", 1)
    node.active = {"nvidia-fabricmanager", "nvidia-persistenced"}
    node.ran = []
    node.machine("nvidia-persistenced").reset_gpus()
    stopped = ["systemctl stop nvidia-persistenced", "nvidia-smi --gpu-reset", "systemctl start nvidia-persistenced"]
    assert node.ran == stopped


def test_what_hangs_holds_up_a_remedy_for_minutes_and_not_for_ever(node: Node) -> None:
    """Each command has a deadline, and a process that cannot be killed fails the remedy after half a minute."""
    (node.proc / "modules").write_text("nvidia_uvm 1 0 - Live\nnvidia 1 1 nvidia_uvm, Live\n")
    services = RepairSettings().services
    node.active = {*services, "nvidia-fabricmanager"}
    for remedy in (node.machine(*services).reset_gpus, node.machine(*services).reload_driver):
        node.given_s = []
        remedy()
        assert 0 < sum(node.given_s) < 3600
    node.holds(102, "/user.slice/user-1000.slice/session-1.scope")
    driver = NvidiaDriver(ask=False, run=node.run, proc=node.proc)
    machine = NodeMachine(
        driver, proc=node.proc, kill=lambda _pid, _number: None, clock=lambda: node.now, sleep=node.sleep
    )
    began, node.ran, node.active = node.now, [], set()
    with pytest.raises(RemedyError, match="do not end: 102"):
        machine.reset_gpus()
    assert (node.ran, round(node.now - began)) == ([], 30)


def test_a_command_that_hangs_or_fails_is_one_sentence() -> None:
    """With the last line that it printed."""
    with pytest.raises(RemedyError, match=r"failed: GPU 0 is in use$"):
        run_command(["sh", "-c", "echo first; echo GPU 0 is in use >&2; exit 3"], 20.0)
    early = "echo GPU 0 is lost; echo; echo Terminating early due to previous errors.; exit 15"
    with pytest.raises(RemedyError, match=r"failed: GPU 0 is lost$"):
        run_command(["sh", "-c", early], 20.0)
    with pytest.raises(RemedyError, match=r"has not ended within 0\.2 s"):
        run_command(["sleep", "60"], 0.2)
    with pytest.raises(RemedyError, match="cannot be run: No such file"):
        run_command(["opsd-no-such-program"], 1.0)


def test_a_command_that_prints_without_end_fills_no_memory() -> None:
    """Its end is kept, within the deadline."""
    said = run_command(["sh", "-c", "yes garbage | head -c 50000000; echo the end"], 60.0)
    assert len(said) <= SAID_BYTES
    assert said.endswith("the end\n")
    with pytest.raises(RemedyError, match=r"has not ended within 0\.3 s"):
        run_command(["yes"], 0.3)


def test_a_command_ends_with_the_program_that_is_interrupted(tmp_path: Path) -> None:
    """Ctrl-C left nvidia-bug-report.sh running for minutes."""
    pid = tmp_path / "pid"

    def interrupt(_number: int, _frame: object) -> None:
        if pid.exists() and pid.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0)  # once: the next would interrupt what follows
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_command(["sh", "-c", f"echo $$ > {pid}; exec sleep 60"], 60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    until(lambda: process_letter(int(pid.read_text())) in DEAD)


# What a repair asks of the two services that have the rights over the driver and the tests.


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
