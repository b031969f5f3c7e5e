"""What a repair does on the node: which processes end, what is stopped meanwhile, and what is left out of evidence."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from opsd.repair import evidence
from opsd.repair.case_file import CaseFile
from opsd.repair.driver import NvidiaDriver
from opsd.repair.machine import SAID_BYTES, NodeMachine, RungError, run_command
from opsd.repair.retest import Preflight, Retested
from opsd.settings.repair import RepairSettings


@dataclass
class Node:
    """A node's /proc and its commands. ``active`` services run, ``broken`` commands fail."""

    proc: Path
    active: set[str] = field(default_factory=set)
    broken: tuple[str, ...] = ()
    ran: list[str] = field(default_factory=list)
    killed: list[tuple[int, int]] = field(default_factory=list)
    enabled: set[str] = field(default_factory=set)
    given_s: list[float] = field(default_factory=list)
    dynamic: tuple[str, ...] = ()
    stubborn: bool = False
    now: float = 0.0

    def run(self, argv: Sequence[str], deadline_s: float) -> str:
        command = " ".join(argv)
        self.given_s.append(deadline_s)
        if argv[1:2] == ["show"]:
            return "yes\n" if argv[-1] in self.dynamic else "no\n"
        if argv[0] == "systemctl" and argv[1].startswith("is-"):
            if argv[-1] not in (self.active if argv[1] == "is-active" else self.enabled):
                raise RungError("inactive")
            return ""
        self.ran.append(command)
        if command.startswith(self.broken or ("never",)):
            raise RungError(f"{command} failed: in use")
        return ""

    def kill(self, pid: int, number: int) -> None:
        self.killed.append((pid, number))
        if not self.stubborn or number == signal.SIGKILL:
            (self.proc / str(pid) / "fd/3").unlink()

    def holds(self, pid: int, cgroup: str, uid: int = 0) -> None:
        """A process of the cgroup and the user that has a GPU open."""
        (self.proc / str(pid) / "fd").mkdir(parents=True)
        (self.proc / str(pid) / "fd/3").symlink_to("/dev/nvidia0")
        (self.proc / str(pid) / "comm").write_text("python\n")
        (self.proc / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
        if uid:
            os.chown(self.proc / str(pid), uid, uid)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def machine(self, *services: str) -> NodeMachine:
        driver = NvidiaDriver(ask=False, services=services, run=self.run, proc=self.proc)
        return NodeMachine(driver, proc=self.proc, kill=self.kill, clock=lambda: self.now, sleep=self.sleep)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "proc").mkdir()
    return Node(tmp_path / "proc")


@pytest.mark.skipif(os.geteuid() != 0, reason="whose a service is says its user id, root's here")
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


@pytest.mark.skipif(os.geteuid() != 0, reason="whose a service is says its user id")
def test_a_container_of_root_s_is_ended_as_a_job_is(node: Node) -> None:
    """Docker's are scopes beside the services; a job's process in slurmd's group is no service either."""
    node.holds(101, "/system.slice/docker-8f1c.scope")
    node.holds(102, "/system.slice/docker-8f1c.scope/system.slice/inner.service")
    node.holds(103, "/system.slice/slurmd.service", uid=1007)
    node.holds(104, "/system.slice/system-exporter.slice/exporter@0.service")
    assert node.machine().end_processes() == "ended 3 processes"
    assert {pid for pid, _ in node.killed} == {101, 102, 103}


@pytest.mark.skipif(os.geteuid() != 0, reason="whose a service is says its user id")
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


def test_services_that_hold_gpus_are_stopped_for_a_reset(node: Node) -> None:
    """Those that ran, which are started again, also when the reset fails."""
    node.active, node.broken = {"nvidia-dcgm"}, ("nvidia-smi",)
    with pytest.raises(RungError, match="in use"):
        node.machine("nvidia-dcgm", "dcgm-exporter").reset_gpus()
    assert node.ran == ["systemctl stop nvidia-dcgm", "nvidia-smi --gpu-reset", "systemctl start nvidia-dcgm"]


def test_the_driver_s_modules_are_unloaded_in_order_and_loaded_again(node: Node) -> None:
    """Also where one of them is in use; those that were not loaded stay so."""
    (node.proc / "modules").write_text("nvidia_uvm 1 0 - Live\nnvidia 1 1 nvidia_uvm, Live\next4 1 1 - Live\n")
    assert node.machine().reload_driver() == "loaded nvidia, nvidia_uvm again"
    load = ["modprobe nvidia", "modprobe nvidia_uvm"]
    assert node.ran == ["modprobe --remove nvidia_uvm", "modprobe --remove nvidia", *load]
    node.ran, node.broken = [], ("modprobe --remove nvidia_uvm",)
    with pytest.raises(RungError, match="in use"):
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
    with pytest.raises(RungError, match="do not end: 102"):
        machine.reset_gpus()
    assert (node.ran, round(node.now - began)) == ([], 30)


def test_a_command_that_hangs_or_fails_is_one_sentence() -> None:
    """With the last line that it printed."""
    with pytest.raises(RungError, match=r"failed: GPU 0 is in use$"):
        run_command(["sh", "-c", "echo first; echo GPU 0 is in use >&2; exit 3"], 20.0)
    with pytest.raises(RungError, match=r"has not ended within 0\.2 s"):
        run_command(["sleep", "60"], 0.2)
    with pytest.raises(RungError, match="cannot be run: No such file"):
        run_command(["opsd-no-such-program"], 1.0)


def test_a_command_that_prints_without_end_fills_no_memory() -> None:
    """Its end is kept, within the deadline."""
    said = run_command(["sh", "-c", "yes garbage | head -c 50000000; echo the end"], 60.0)
    assert len(said) <= SAID_BYTES
    assert said.endswith("the end\n")
    with pytest.raises(RungError, match=r"has not ended within 0\.3 s"):
        run_command(["yes"], 0.3)


def test_an_archive_of_evidence_is_bounded_and_has_no_secrets(tmp_path: Path) -> None:
    """Long parts keep their end; what is missing stands in the index; names come from opsd alone."""

    def run(argv: Sequence[str], _deadline_s: float) -> str:
        if argv[0] == "dmesg":
            return "x" * (evidence.PART_BYTES + 10) + "\nWANDB_API_KEY=abc123 and the end"
        if argv[0] == "scontrol":
            return "Reason=login with https://ann:hunter2@host Authorization: Bearer xyz"
        raise RungError(f"{argv[0]} cannot be run: No such file or directory")

    sources = evidence.Sources("../n 1", tmp_path, tmp_path / "preflight.sqlite", run=run, nvidia_report="none")
    path = evidence.make(sources, 1_763_700_000.0)
    assert path == tmp_path / "evidence" / "evidence-_n_1-20251121T044000Z.tar.gz"
    assert path.stat().st_mode & 0o077 == 0
    with tarfile.open(path) as archive:
        parts = {Path(member.name).name: archive.extractfile(member) for member in archive}
        texts = {name: file.read().decode() for name, file in parts.items() if file is not None}
        assert all(member.isreg() and not member.name.startswith(("/", ".")) for member in archive)
    assert len(texts["kernel-ring.txt"]) == evidence.PART_BYTES
    assert texts["kernel-ring.txt"].endswith("WANDB_API_KEY=(left out) and the end")
    assert "hunter2" not in texts["slurm-node.txt"]
    assert "xyz" not in texts["slurm-node.txt"]
    index = json.loads(texts["index.json"])["parts"]
    assert index["kernel-ring.txt"]["cut"] is True
    assert index["nvidia-smi.txt"] == {"missing": "nvidia-smi cannot be run: No such file or directory"}
    assert index["nvidia-bug-report.log.gz"] == {"missing": "none is not installed"}


def test_a_program_s_own_report_is_taken_along(tmp_path: Path) -> None:
    """As it is, compressed by its own program."""
    program = tmp_path / "report"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "--safe-mode --output-file" ] && echo all >"$3.gz"\n')
    program.chmod(0o755)
    sources = evidence.Sources("n1", tmp_path, tmp_path / "preflight.sqlite", nvidia_report=str(program))

    def run(argv: Sequence[str], deadline_s: float) -> str:
        return run_command(argv, deadline_s) if argv[0] == str(program) else ""

    path = evidence.make(evidence.Sources(**{**_fields(sources), "run": run}), 0.0, tmp_path / "out.tar.gz")
    with tarfile.open(path) as archive:
        (name,) = [name for name in archive.getnames() if "bug-report" in name]
        file = archive.extractfile(name)
        assert file is not None
        assert file.read() == b"all\n"


def _fields(sources: evidence.Sources) -> dict[str, object]:
    return {name: getattr(sources, name) for name in ("node", "state_dir", "preflights", "library", "nvidia_report")}


def test_only_the_newest_archives_and_cases_are_kept(tmp_path: Path) -> None:
    """Nodes that fail for months fill no disk."""
    sources = evidence.Sources("n1", tmp_path, tmp_path / "none", run=lambda _argv, _s: "", nvidia_report="none")
    for number in range(evidence.KEPT + 3):
        path = evidence.make(sources, 1e9 + number)
        os.utime(path, (number, number))
    assert len([*(tmp_path / "evidence").glob("*.tar.gz")]) == evidence.KEPT
    assert CaseFile(tmp_path).past() == []


def test_a_retest_that_could_check_nothing_has_failed(tmp_path: Path) -> None:
    """Unknown is not healthy: none of the checks for the fault applies to this machine, or all are skipped."""
    skip = ("gpu_health",)
    whole = ["--set=agent.node=n1", f"--set=agent.state_dir={tmp_path}"]
    found = Preflight([*whole, f"--set=preflight.skip={_others('numa')}"], "quick", skip)(["gpu_health"])
    assert (found.passed, "none of gpu_health could be run" in found.detail) == (False, True), found
    broken = Preflight(["--set=agent.nonsense=1"], "quick")([])
    assert (broken.passed, "unknown key agent.nonsense" in broken.detail) == (False, True), broken


def test_a_retest_that_must_end_takes_its_load_with_it(tmp_path: Path) -> None:
    """Within seconds, not at the end of a profile of hours."""
    here = psutil.Process()
    before = {*here.children(recursive=True)}

    def stop() -> str:
        """Once a check works."""
        loads = {*here.children(recursive=True)} - before
        return "n1 is in service" if any("opsd.preflight.worker" in _command(load) for load in loads) else ""

    own = ["--set=agent.node=n1", f"--set=agent.state_dir={tmp_path}"]
    found = Preflight([*own, f"--set=preflight.skip={_others('cpu')}"], "standard", look_s=0.1)(["cpu"], stop)
    assert found == Retested(False, "preflight standard was stopped: n1 is in service", stopped=True)
    assert not {child for child in here.children(recursive=True) if child.is_running()} - before


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _others(name: str) -> list[str]:
    from opsd.preflight.checks import CHECKS

    return [check.name for check in CHECKS if check.name != name]


SECRETS = pytest.mark.parametrize(
    "text",
    [
        '{"log": "{\\"password\\": \\"hunter2\\"}"}',
        'token: "three words hunter2"',
        "PASSWORD=a;hunter2",
        "mount.cifs --password hunter2 //server",
        '{"Authorization": "Bearer hunter2"}',
        "Authorization: hunter2",
        "https://hunter2@host/",
        "private_key=hunter2",
        "SLURM_JWT=hunter2",
        "curl -u ann:hunter2 https://host/",
        "curl --user ann:hunter2 https://host/",
        "curl -sfuann:hunter2 https://host/",
        "curl --proxy-user=ann:hunter2 https://host/",
        "Cookie: session=hunter2; other=hunter2",
        "Set-Cookie: id=hunter2; HttpOnly",
        '{"cookie": "session=hunter2"}',
        "https://account.blob.core.windows.net/c/b?sv=2022&sig=hunter2%3D&se=2026",
        "https://bucket.s3.amazonaws.com/key?X-Amz-Signature=hunter2&X-Amz-Expires=60",
        "https://bucket.s3.amazonaws.com/key?X-Amz-Credential=hunter2&x=1",
        "https://storage.googleapis.com/b/o?X-Goog-Signature=hunter2",
        "MYSQL_PWD=hunter2",
        "SSHPASS=hunter2 sshpass -e ssh",
        "CIFS: mount of //server with pass=hunter2,vers=3",
        "python train.py --wandb-key hunter2",
        "python train.py --wandb_key=hunter2",
        '["python", "train.py", "--hf-token", "hunter2"]',
        '{"stack": "[\\"--hf-token\\", \\"hunter2\\"]"}',
        "huggingface-cli login hf_hunter2hunter2hunter2hunter2",
        "glpat-hunter2hunter2hunter2",
        "sent eyJhunter2hunter2hunter2.hunter2.hunter2_hunter2",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n-----END OPENSSH PRIVATE KEY-----",
    ],
)


def test_what_only_looks_like_a_secret_stays() -> None:
    """Verdicts of checks, addresses and keys of hashes are what a vendor needs."""
    text = '{"passed": true, "verdict": "pass", "task-0": 1} iommu: bypass: on\nkey 0x3 of gpu 0, disk-sda, skew 3'
    assert evidence.without_secrets(text) == text


@SECRETS
def test_secrets_are_left_out_however_they_are_quoted(text: str) -> None:
    """Incidents are JSON that quotes logs, which may quote JSON themselves."""
    assert "hunter2" not in evidence.without_secrets(text)


def test_of_too_many_incidents_the_newest_are_kept(tmp_path: Path) -> None:
    """A part that is too long loses its beginning."""
    with sqlite3.connect(tmp_path / "journal.db") as database:
        database.execute("CREATE TABLE incidents (document TEXT, opened_at REAL)")
        rows = [(json.dumps({"id": at, "text": "x" * 20_000}), at) for at in range(220)]
        database.executemany("INSERT INTO incidents VALUES (?, ?)", rows)
    sources = evidence.Sources("n1", tmp_path, tmp_path / "none", run=lambda *_: "", nvidia_report="none")
    with tarfile.open(evidence.make(sources, 1_763_700_000.0)) as archive:
        member = next(one for one in archive if one.name.endswith("/incidents.json"))
        file = archive.extractfile(member)
        assert file is not None
        assert '"id": 219' in file.read().decode()


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_an_archive_takes_the_place_of_files_only(tmp_path: Path, kind: str) -> None:
    """Root could otherwise rename one over /dev/null."""
    out = tmp_path / "out"
    os.mkfifo(out) if kind == "pipe" else out.mkdir()
    sources = evidence.Sources("n1", tmp_path, tmp_path / "none", run=lambda *_: "", nvidia_report="none")
    with pytest.raises(OSError, match="not a regular file"):
        evidence.make(sources, 1_763_700_000.0, out)
    assert not out.is_file()
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_command_ends_with_the_program_that_is_interrupted(tmp_path: Path) -> None:
    """Ctrl-C left nvidia-bug-report.sh running for minutes."""
    pid = tmp_path / "pid"

    def interrupt(_number: int, _frame: object) -> None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_command(["sh", "-c", f"echo $$ > {pid}; exec sleep 60"], 60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    stat, deadline = Path(f"/proc/{pid.read_text().strip()}/stat"), time.monotonic() + 30
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"
