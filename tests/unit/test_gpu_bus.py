"""GPUs on the PCI bus, and the releases of the driver's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.agent.window import Window
from opsd.collectors.base import Reading, Sample
from opsd.collectors.lib.pci import RELEASES, GpuBus
from opsd.runbooks import gpu_driver_failed
from tests.fakes.facts import rank
from tests.fakes.incidents import WALL, incident
from tests.fakes.tree import write_tree

DEVICES = {
    "0000:1a:00.0": ("0x10de", "0x030200", "nvidia"),
    "0000:98:00.0": ("0x10de", "0x030200", ""),
    "0000:99:00.0": ("0x10de", "0x030000", "vfio-pci"),
    "0000:1a:00.1": ("0x10de", "0x040300", "snd_hda_intel"),
    "0000:06:00.0": ("0x1a03", "0x030000", "ast"),
    "0000:5c:00.0": ("0x15b3", "0x020700", "mlx5_core"),
}
ROOT = "27 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with two GPUs, one without a driver, and a third that belongs to virtual machines."""
    monkeypatch.setattr("opsd.collectors.lib.pci.sees_all_processes", lambda _proc: True)
    for name, (vendor, kind, driver) in DEVICES.items():
        folder = tmp_path / "sys/bus/pci/devices" / name
        write_tree(folder, {"vendor": vendor, "class": kind})
        if driver:
            (tmp_path / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers" / driver)
    write_tree(tmp_path / "sys", {"module/nvidia/version": "580.65.06"})
    write_tree(tmp_path / "proc", {"self/mountinfo": ROOT, "1/mountinfo": ROOT})
    folder = tmp_path / "root/usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (folder / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.95.05")
    return tmp_path


def look(node: Path) -> list[tuple[str, ...]]:
    return [sample.labels for sample in GpuBus(node / "proc", node / "sys", node / "root").samples()]


def test_gpus_and_releases(node: Path) -> None:
    """Other devices of NVIDIA, other graphics adapters and network cards are left out."""
    assert look(node) == [
        ("00000000:1A:00.0", "nvidia", "no", "no"),
        ("00000000:98:00.0", "", "no", "no"),
        ("00000000:99:00.0", "vfio-pci", "yes", "no"),
        ("580.65.06", "580.95.05"),
    ]


def test_gpus_that_the_driver_was_told_to_leave_out(node: Path) -> None:
    """NVreg_ExcludedGpus: the driver says so itself."""
    told = "Model: \t\t NVIDIA H100\nIRQ:   \t\t 18\nGPU Excluded:\t Yes\n"
    write_tree(node / "proc/driver/nvidia/gpus/0000:1a:00.0", {"information": told})
    assert look(node)[0] == ("00000000:1A:00.0", "nvidia", "no", "yes")


def test_virtual_functions_are_no_gpus_of_the_node(node: Path) -> None:
    """A GPU that is shared among virtual machines has many of them."""
    (node / "sys/bus/pci/devices/0000:98:00.0/physfn").symlink_to(node / "sys/bus/pci/devices/0000:1a:00.0")
    assert [labels[0] for labels in look(node)] == ["00000000:1A:00.0", "00000000:99:00.0", "580.65.06"]


def test_a_container_s_library_is_not_the_node_s(node: Path) -> None:
    """One that shares the node's processes has another root."""
    write_tree(node / "proc", {"self/mountinfo": "900 1 0:77 / / rw - overlay overlay rw\n"})
    assert look(node)[-1] == ("580.65.06", "")


def test_a_container_of_its_own_says_nothing(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the whole bus and was given some of the GPUs."""
    monkeypatch.setattr("opsd.collectors.lib.pci.sees_all_processes", lambda _proc: False)
    assert look(node) == []


def test_a_node_without_nvidia_has_no_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither devices nor a module."""
    monkeypatch.setattr("opsd.collectors.lib.pci.sees_all_processes", lambda _proc: True)
    assert look(tmp_path) == []


def test_a_replaced_library_drains_the_node_under_a_run() -> None:
    """The run is not swapped to another node: it goes on, and only what is started later fails."""
    window = Window("n01")
    for second in range(0, 130, 5):
        window.begin(float(second), WALL + second)
        sample = Sample(RELEASES, 1.0, ("580.65.06", "580.95.05"))
        window.add("host", Reading((sample,), (), (rank(0, world_size=8),)))
    (found,) = gpu_driver_failed.RUNBOOK.detect(window)
    opened = incident(kind=found.kind, severity=found.severity, data=found.data)
    actions = gpu_driver_failed.RUNBOOK.remedy(opened, window)
    assert [action.verb for action in actions] == ["drain_node", "notify"]
