"""The host collector over a fixture of /proc, and its count of processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opsd.collectors.host import LOOK_S, PROCESS_STATES, HostCollector, ProcessStates, cpu_ratios, parse_pressure
from opsd.collectors.lib.clock import ClockState, read_clock
from tests.fakes.clock import FakeClock

# The host collector over a fixture of /proc.


PRESSURE = "some avg10=1.53 avg60=0.87 avg300=0.31 total={some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={full}\n"

MEMORY = """\
MemTotal:       2113513480 kB
MemFree:        1513374532 kB
MemAvailable:   1900000000 kB
Buffers:              2104 kB
Cached:           12000000 kB
Active:           22000000 kB
Inactive:         11000000 kB
Shmem:             8000000 kB
Slab:              1000000 kB
SReclaimable:       500000 kB
SwapTotal:         4194304 kB
SwapFree:          3145728 kB
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A node under I/O pressure with a process that hangs on its disk and one that nobody waits for."""
    root = tmp_path / "proc"
    write(
        root,
        {
            "stat": "cpu  1000 0 200 8000 800 0 0 0 0 0\nbtime 1700000000\nprocs_running 3\nprocs_blocked 2\n",
            "loadavg": "12.50 8.25 4.00 3/2048 99999\n",
            "meminfo": MEMORY,
            "vmstat": "pswpin 0\npswpout 0\n",
            "sys/fs/file-nr": "9984\t0\t9223372036854775807\n",
            "pressure/cpu": PRESSURE.format(some=1_500_000, full=0),
            "pressure/memory": PRESSURE.format(some=0, full=0),
            "pressure/io": PRESSURE.format(some=250_000_000, full=90_000_000),
            "1/stat": "1 (systemd) S 0 1 1 0",
            "77/stat": "77 (a (strange) name) D 1 77 77 0",
            "78/stat": "78 (defunct) Z 1 78 78 0",
            "self/stat": "not a process",
            "self/mountinfo": "27 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n",
        },
    )
    return root


@pytest.fixture
def read(proc: Path) -> Callable[[], dict[tuple[str, ...], float]]:
    collector = HostCollector(proc, mounts=(), scan_s=0.0)
    return lambda: {(s.metric.name, *s.labels): s.value for s in collector.collect().samples}


def test_memory_load_and_pressure_are_in_base_units(read: Callable[[], dict[tuple[str, ...], float]]) -> None:
    """Bytes, not kibibytes; seconds, not microseconds."""
    samples = read()
    assert samples["opsd_host_memory_total_bytes",] == 2113513480 * 1024
    assert samples["opsd_host_memory_available_bytes",] == 1900000000 * 1024
    assert samples["opsd_host_swap_used_bytes",] == 1024**3
    assert samples["opsd_host_load_average", "5"] == 8.25
    assert samples["opsd_host_pressure_seconds_total", "io", "full"] == 90.0
    assert samples["opsd_host_boot_time_seconds",] == 1_700_000_000
    assert samples["opsd_host_open_files",] == 9984


def test_stuck_and_dead_processes_are_counted(read: Callable[[], dict[tuple[str, ...], float]]) -> None:
    """The name of a process may hold anything, brackets and spaces included; every state is there, at zero too."""
    samples = read()
    assert samples["opsd_host_processes", "uninterruptible"] == 1
    assert samples["opsd_host_processes", "zombie"] == 1
    assert samples["opsd_host_processes", "stopped"] == 0
    assert samples["opsd_host_tasks_blocked",] == 2


def test_processor_time_is_that_since_the_last_collection(
    proc: Path, read: Callable[[], dict[tuple[str, ...], float]]
) -> None:
    """Only the first collection, which has nothing to compare with, shows the average since boot."""
    assert read()["opsd_host_cpu_ratio", "idle"] == 0.8
    write(proc, {"stat": "cpu  1300 0 300 8400 1000 0 0 0 0 0\nbtime 1700000000\nprocs_blocked 0\n"})
    samples = read()
    ratios = [samples["opsd_host_cpu_ratio", mode] for mode in ("user", "system", "idle", "iowait")]
    assert ratios == pytest.approx([0.3, 0.1, 0.4, 0.2])


def test_processes_are_looked_at_only_every_few_seconds(proc: Path) -> None:
    """On a node with thousands of processes that look is the expensive part."""
    now = [0.0]
    collector = HostCollector(proc, mounts=(), clock=lambda: now[0], scan_s=10.0)

    def zombies() -> float:
        samples = collector.collect().samples
        return next(s.value for s in samples if s.labels == ("zombie",))

    assert zombies() == 1
    (proc / "78/stat").unlink()
    now[0] = 9.0
    assert zombies() == 1
    now[0] = 10.0
    assert zombies() == 0


def test_a_kernel_without_pressure_files_has_no_such_series(proc: Path) -> None:
    """An expected absence is no error and no zero."""
    for path in (proc / "pressure").iterdir():
        path.unlink()
    names = {s.metric.name for s in HostCollector(proc, mounts=()).collect().samples}
    assert "opsd_host_pressure_seconds_total" not in names
    assert "opsd_host_memory_total_bytes" in names


def test_space_and_inodes_of_mounts(proc: Path, tmp_path: Path) -> None:
    """A mount point that does not exist is left out; the others are there."""
    collector = HostCollector(proc, mounts=(tmp_path, tmp_path / "not mounted"))
    samples = {(s.metric.name, *s.labels): s.value for s in collector.collect().samples}
    assert samples["opsd_host_filesystem_available_bytes", str(tmp_path)] > 0
    assert ("opsd_host_filesystem_size_bytes", str(tmp_path / "not mounted")) not in samples


def test_a_network_mount_is_not_looked_at(proc: Path, tmp_path: Path) -> None:
    """Its server may not answer, and with it memory, pressure and the clock of this node would be unknown."""
    table = proc / "self/mountinfo"
    table.write_text(f"{table.read_text()}50 27 0:51 / {tmp_path} rw - nfs4 10.0.0.1:/export rw\n")
    samples = {(s.metric.name, *s.labels) for s in HostCollector(proc, mounts=(tmp_path, Path("/"))).collect().samples}
    assert ("opsd_host_filesystem_size_bytes", str(tmp_path)) not in samples
    assert ("opsd_host_filesystem_size_bytes", "/") in samples


def test_a_mount_that_cannot_be_read_blinds_nothing(proc: Path, tmp_path: Path) -> None:
    """Here its path leads through a file; a stale handle and a folder that may not be entered are the same."""
    (tmp_path / "file").touch()
    samples = HostCollector(proc, mounts=(tmp_path / "file" / "inside",)).collect().samples
    assert not [sample for sample in samples if sample.metric.name == "opsd_host_filesystem_size_bytes"]


def test_a_missing_proc_is_an_error(tmp_path: Path) -> None:
    """Not an empty reading that would pass for an idle node."""
    with pytest.raises(OSError, match="stat"):
        HostCollector(tmp_path / "nowhere", mounts=()).collect()


def test_psutil_is_left_as_it_was(proc: Path) -> None:
    """Its root is global to the process."""
    before = psutil.PROCFS_PATH
    HostCollector(proc, mounts=()).collect()
    assert before == psutil.PROCFS_PATH


def test_something_else_than_a_pressure_file_is_refused() -> None:
    """A changed format is an error of the collector, not a zero."""
    with pytest.raises(ValueError, match="not a pressure file"):
        parse_pressure("some avg10=0.00\n")


times = st.fixed_dictionaries({mode: st.floats(0, 1e9) for mode in ("user", "system", "idle", "iowait", "guest")})


@given(times, times)
def test_processor_ratios_are_shares(before: dict[str, float], after: dict[str, float]) -> None:
    """They add up to one or are not there, even where the kernel's counters went back."""
    ratios = cpu_ratios(before, after)
    assert "guest" not in ratios
    assert not ratios or sum(ratios.values()) == pytest.approx(1.0)


def _values(collector: HostCollector) -> dict[tuple[str, ...], float]:
    return {(sample.metric.name, *sample.labels): sample.value for sample in collector.collect().samples}


def test_numa_nodes_show_what_is_left_and_what_went_elsewhere(proc: Path, tmp_path: Path) -> None:
    """A node without memory is left out; one whose files vanish costs nothing else."""
    files = {}
    for node, kib in ((0, 1024), (1, 0)):
        folder = f"devices/system/node/node{node}"
        files[f"{folder}/meminfo"] = f"Node {node} MemTotal: {kib} kB\nNode {node} MemFree: {kib // 2} kB\n"
        files[f"{folder}/numastat"] = "numa_hit 9\nnuma_miss 3\nnuma_foreign 7\n"
    write(tmp_path / "sys", files)
    (tmp_path / "sys/devices/system/node/node2").mkdir()
    values = _values(HostCollector(proc, (), sys=tmp_path / "sys"))
    assert values["opsd_host_numa_memory_total_bytes", "0"] == 1024 * 1024
    assert values["opsd_host_numa_memory_free_bytes", "0"] == 512 * 1024
    assert values["opsd_host_numa_missed_pages_total", "0"] == 7
    assert {labels for name, *labels in values if "numa" in name for labels in labels} == {"0"}


@pytest.mark.parametrize("synchronised", [True, False])
def test_a_clock_that_nobody_keeps_right_has_no_offset(proc: Path, synchronised: bool) -> None:
    """Its figures would mean nothing, and zero would look healthy."""
    state = ClockState(synchronised, offset_s=-0.002, max_error_s=0.5)
    values = _values(HostCollector(proc, (), wall_clock=lambda: state))
    assert values["opsd_host_clock_synchronized",] == synchronised
    assert values.get(("opsd_host_clock_offset_seconds",)) == (-0.002 if synchronised else None)
    assert values.get(("opsd_host_clock_max_error_seconds",)) == (0.5 if synchronised else None)


def test_the_kernel_answers_about_its_clock() -> None:
    """On any Linux, synchronised or not."""
    assert read_clock().max_error_s >= 0


# Counting processes, however many there are and whatever they are called.


names = st.sampled_from([b"a", b") Z 1", b"\n(x) D", b"\xff\r", b"((", b" "])


def processes(proc: Path, states: list[tuple[str, bytes]]) -> None:
    """Processes of these states and names, beside what else is in procfs."""
    (proc / "sys").mkdir(parents=True)
    for number, (letter, name) in enumerate(states, 1):
        (proc / str(number)).mkdir()
        (proc / str(number) / "stat").write_bytes(b"%d (%s) %s 1 1 1 0 -1" % (number, name, letter.encode()))


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from("RSDTtZIXK?"), names), max_size=40))
def test_every_process_is_in_exactly_one_state(states: list[tuple[str, bytes]]) -> None:
    """Whatever its name; unknown letters of future kernels are counted too."""
    with tempfile.TemporaryDirectory() as folder:
        processes(Path(folder), states)
        census = ProcessStates(Path(folder), FakeClock().monotonic)
        census.begin()
        found = census.go_on()
    assert found == {
        **{name: sum(letter == one for one, _ in states) for letter, name in PROCESS_STATES.items()},
        "other": sum(one not in PROCESS_STATES for one, _ in states),
    }


def test_hundreds_of_thousands_are_counted_a_part_at_a_time(tmp_path: Path) -> None:
    """A look that takes long enough ends; the last whole count is shown until there is another."""
    processes(tmp_path, [("S", b"sleep")] * 1000)
    census, looks = ProcessStates(tmp_path, slow()), 0
    census.begin()
    while not census.go_on():
        looks += 1
        census.begin()
    assert 4 <= looks <= 1000
    (tmp_path / "7/stat").unlink()
    census.begin()
    assert census.go_on()["sleeping"] == 1000
    assert any(census.go_on()["sleeping"] == 999 for _ in range(looks + 1))


def slow() -> Callable[[], float]:
    """A clock by which half of a look passes between two calls."""
    ticks = count()
    return lambda: next(ticks) * LOOK_S / 2
