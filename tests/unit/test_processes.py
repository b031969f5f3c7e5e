"""Looking processes up, in containers too, and who has a GPU open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opsd.collectors.lib.host_pids import MAX_ALIKE, RENEW_S, SEARCH_S, HostPids
from opsd.collectors.lib.processes import (
    DEAD,
    MAJOR,
    Identity,
    character_device,
    gpu_holders,
    identify,
    process_letter,
    sees_all_processes,
    slurm_job,
)
from tests.fakes.clock import FakeClock, eventually
from tests.fakes.nvml import gpu_device
from tests.fakes.tree import FUSE, silent_mount

# Looking processes up.


def test_a_process_lives_becomes_a_zombie_and_is_gone() -> None:
    """A zombie still has its number, and is as dead as one that has none any more."""
    assert process_letter(os.getpid()) not in DEAD
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        assert eventually(lambda: process_letter(child.pid) == "Z")
    assert process_letter(child.pid) is None
    assert {"Z", None} <= set(DEAD)


def test_names_of_processes_do_not_matter(tmp_path: Path) -> None:
    """A name may hold spaces and brackets."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text("7 (a) R (b) D 1 7 7")
    assert process_letter(7, tmp_path) == "D"
    (tmp_path / "7/stat").write_text("")
    assert process_letter(7, tmp_path) is None


def test_without_a_proc_of_the_initial_namespace_not_all_are_seen(tmp_path: Path) -> None:
    """A folder that is no such namespace, or none at all."""
    assert not sees_all_processes(tmp_path)
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    assert not sees_all_processes(tmp_path)


@pytest.mark.parametrize(
    ("path", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", "123"),
        ("0::/system.slice/node1_slurmstepd.scope/job_7/step_batch/user/task_special", "7"),
        ("9:memory:/slurm/uid_1000/job_42/step_0/task_0", "42"),
        ("4:cpuset:/slurm_node1/uid_1000/job_42", "42"),
        ("0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_4242/step_0", ""),
        ("0::/system.slice/slurmstepd.scope/sEKNKTV3WPV500/step_0/user/task_0", "sEKNKTV3WPV500"),
        ("0::/hpc.slice/hpc-slurm.slice/slurmstepd.scope/job_9/step_0", "9"),
        ("0::/system.slice/slurmstepd.scope/system", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/slurmstepd.scope/sEKNKTV3WPV500", ""),
        ("0::/user.slice/user-1000.slice/slurm/uid_1000/job_4242", ""),
        ("0::/../slurmstepd.scope/job_4242", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/x\r0::/system.slice/slurmstepd.scope/job_4242", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/x\v0::/system.slice/slurmstepd.scope/job_4242", ""),
        ("0::/", ""),
        ("", ""),
    ],
)
def test_the_job_of_a_process_is_that_of_its_control_group(path: str, job: str) -> None:
    """As Slurm makes them for control groups of both versions; a user can make groups of these names further down."""
    assert slurm_job(path + "\n") == job


def test_a_process_has_a_user() -> None:
    """The real one; a process that is gone has none."""
    assert identify(os.getpid()) == Identity(os.getuid(), identify(os.getpid()).job)
    assert identify(1 << 22) is None


def test_a_name_does_not_change_whose_a_process_is() -> None:
    """The kernel leaves a carriage return in a name as it is, at which text mode begins a line."""
    code = r"import time; open('/proc/self/comm', 'w').write('\rUid:\t4242 '); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as named:
        assert named.stdout is not None
        named.stdout.readline()
        found = identify(named.pid)
        named.kill()
    assert found is not None
    assert found.user == os.getuid()


# Processes of containers by their numbers on this machine, in a procfs of its own.


ADA, BOB = 1001, 1002

Add = Callable[..., None]


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    folder.mkdir()
    return folder


@pytest.fixture
def add(proc: Path) -> Add:
    """Adds a process with its numbers from outside to inside, in the container ``of``."""

    def add(*numbers: int, user: int = ADA, start: int = 100, of: str = "") -> None:
        folder = proc / str(numbers[0])
        (folder / "ns").mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(f"{numbers[0]} (py) R {' 0' * 18} {start} 0")
        listed = "\t".join(map(str, numbers))
        (folder / "status").write_text(f"Name:\tpy\nUid:\t{user}\t{user}\t{user}\t{user}\nNSpid:\t{listed}\n")
        if os.geteuid() == 0:
            os.chown(folder, user, user)
        namespace = proc.parent / f"namespace-{of}"
        namespace.touch()
        if not (folder / "ns/pid").exists():
            (folder / "ns/pid").symlink_to(namespace)

    return add


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def host(proc: Path, clock: FakeClock) -> HostPids:
    return HostPids(proc, clock=clock.monotonic)


def test_a_process_has_its_own_number_without_a_container(add: Add, host: HostPids) -> None:
    """Only the one that began then."""
    add(70)
    assert host.find(ADA, 70, 100) == 70
    assert host.find(ADA, 70, 101) is None


def test_a_process_of_a_container_is_found_by_its_number_inside(add: Add, host: HostPids) -> None:
    """Whose number may also be that of another process here, of another container, or of another user's."""
    add(7, start=1)
    add(70, 7, of="a")
    add(80, 3, 7, start=200, of="b")
    add(90, 7, user=BOB, of="c")
    assert [host.find(ADA, 7, 100), host.find(ADA, 7, 200), host.find(BOB, 7, 100)] == [70, 80, 90]
    assert host.find(BOB, 7, 200) is None


def test_what_was_searched_for_in_vain_is_not_searched_for_again(
    add: Add, host: HostPids, clock: FakeClock, proc: Path
) -> None:
    """A page outlives its process; and what ends is gone at once."""
    add(70, 7, of="a")
    assert (host.find(ADA, 7, 100), host.find(ADA, 8, 100)) == (70, None)
    clock.advance(SEARCH_S)
    assert host.find(ADA, 8, 100) is None
    add(80, 8, of="a")
    clock.advance(SEARCH_S)
    assert host.find(ADA, 8, 100) is None
    (proc / "70/stat").unlink()
    assert host.find(ADA, 7, 100) is None


def test_processes_that_begin_later_are_found_in_the_next_search(add: Add, host: HostPids, clock: FakeClock) -> None:
    """There is one search in a second, whoever asks for what."""
    assert host.find(ADA, 7, 100) is None
    add(80, 8, of="a")
    assert host.find(ADA, 8, 100) is None
    clock.advance(SEARCH_S)
    assert host.find(ADA, 8, 100) == 80


def test_helpers_are_those_of_the_same_container(add: Add, host: HostPids, clock: FakeClock) -> None:
    """The same numbers exist in each of them, and are used again after a while."""
    add(70, 7, of="a")
    add(71, 9, of="a")
    add(81, 9, of="b")
    assert host.beside(ADA, 70, 9) == 71
    assert host.beside(BOB, 70, 9) is None
    add(71, 9, start=300, of="a")
    assert host.beside(ADA, 70, 9) is None
    clock.advance(RENEW_S)
    assert host.beside(ADA, 70, 9) == 71
    assert host.beside(ADA, 12345, 9) is None


class LookClock(FakeClock):
    """Time passes with each question, so that a look ends after a few processes."""

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now


def test_any_number_of_processes_is_searched_a_part_at_a_time(add: Add, proc: Path) -> None:
    """100,000 took 2 s of each second, in which the agent saw no run of anybody."""
    clock = LookClock()
    host = HostPids(proc, clock=clock.monotonic, look_s=0.01)
    for number in range(100, 200):
        add(number, 7, start=number, of="a")
    before, looks = clock.now, 0
    while host.find(ADA, 7, 199) != 199:
        looks += 1
        assert looks < 100
        assert clock.now - before < 0.05
        clock.advance(SEARCH_S)
        before = clock.now
    assert looks >= 1
    assert host.find(ADA, 8, 1) is None


def test_what_is_asked_for_is_found_among_any_number_of_its_kind(add: Add, host: HostPids) -> None:
    """A search does not remember all of those that nobody has asked for."""
    for number in range(2 * MAX_ALIKE):
        add(1000 + number, 7, start=number, of="a")
    assert [host.find(ADA, 7, number) for number in (2 * MAX_ALIKE - 1,)] == [1000 + 2 * MAX_ALIKE - 1]


# Who has a GPU open, by the number of the device that is open and not by its name.


HOLDS = "import os, sys; os.open(sys.argv[1], os.O_PATH); print('open', flush=True); sys.stdin.read()"

STATS = "import sys; from opsd.collectors.lib.processes import character_device as look; print(look(sys.argv[1]))"


def has_open(proc: Path, pid: int, *files: str) -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "comm").write_text("python\n")
    for number, target in enumerate(files):
        (proc / str(pid) / "fd" / str(number)).symlink_to(target)


def test_a_gpu_is_held_under_whatever_name(tmp_path: Path) -> None:
    """A file that has the name of one is none, nor is another device, nor one that was closed meanwhile."""
    proc, fake = tmp_path / "proc", tmp_path / "nvidia0"
    proc.mkdir()
    fake.touch()
    has_open(proc, 10, "/dev/tty", gpu_device(proc))
    has_open(proc, 11, str(fake), "/dev/tty", "/dev/nvidia0", "socket:[7]")
    assert [*gpu_holders(proc)] == [(10, "python")]


def test_the_drivers_other_devices_are_no_gpus(tmp_path: Path) -> None:
    """Control and modeset device, capabilities of MIG: many have them open who use no GPU."""
    (tmp_path / "devices").write_text("Character devices:\n  1 nvidia-caps\n  1 nvidia-uvm\n195 nvidia-frontend\n")
    has_open(tmp_path, 10, "/dev/zero")
    assert [*gpu_holders(tmp_path)] == []


@pytest.mark.parametrize(("minor", "held"), [(0, True), (7, True), (254, False), (255, False)])
def test_a_device_that_a_process_has_made_for_itself(tmp_path: Path, minor: int, held: bool) -> None:
    """With the numbers of the driver, on this kernel. Needs the right to make devices."""
    made = tmp_path / "mine"
    try:
        os.mknod(made, 0o20600, os.makedev(MAJOR, minor))
    except PermissionError:
        pytest.skip("may not make devices here")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, made], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (process.pid in dict(gpu_holders())) is held
        process.communicate(b"")


@pytest.mark.skipif(not os.access(FUSE, os.W_OK), reason="needs FUSE")
def test_a_file_of_a_server_that_does_not_answer_holds_up_nothing(tmp_path: Path) -> None:
    """What a dead job has left behind often has such files open: the kernel knows their type."""
    with silent_mount(tmp_path):
        done = subprocess.run([sys.executable, "-c", STATS, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.stdout == "None\n"


def test_what_is_no_device_has_no_number(tmp_path: Path) -> None:
    """Folders, and what is not there."""
    assert character_device("/dev/zero") == (1, 5)
    assert character_device(tmp_path) is character_device(tmp_path / "gone") is None
