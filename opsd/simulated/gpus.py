"""Simulated GPUs: the state file of a node's GPUs, and the library that reads it as NVML.

One simulated GPU: what is set on it and what the simulated NVML library makes of that.

The state file of the simulated GPUs: the mirror of ``gpu.h``, field by field.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from uuid import UUID

MAGIC: Final = 0x4453504F
VERSION: Final = 3
MAX_GPUS: Final = 16
LINKS: Final = 18
PROCESSES: Final = 8
XIDS: Final = 16
INSTANCES: Final = 7
NO_INSTANCE: Final = 0xFFFFFFFF


class Totals(ctypes.Structure):
    """``struct totals`` of gpu.h."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("engine_s", "sm_s", "warps_s", "tensor_s", "dram_s")),
        *((name, ctypes.c_double) for name in ("pcie_sent", "pcie_received", "link_kib")),
    )


class MigState(ctypes.Structure):
    """``struct mig`` of gpu.h."""

    _fields_ = (
        ("uuid", ctypes.c_char * 64),
        ("name", ctypes.c_char * 64),
        *((name, ctypes.c_uint64) for name in ("memory_total", "memory_used")),
        *((name, ctypes.c_uint32) for name in ("gpu_instance", "compute_instance")),
    )


class GpuState(ctypes.Structure):
    """``struct gpu`` of gpu.h; the fields from ``limit_w`` on are written by the library."""

    _fields_ = (
        ("uuid", ctypes.c_char * 64),
        ("name", ctypes.c_char * 64),
        ("bus_id", ctypes.c_char * 32),
        ("serial", ctypes.c_char * 32),
        ("vbios", ctypes.c_char * 32),
        ("unsupported", ctypes.c_char * 512),
        ("denied", ctypes.c_char * 256),
        *((name, ctypes.c_double) for name in ("utilization", "memory_utilization", "demand_w", "cooling")),
        *((name, ctypes.c_double) for name in ("ambient_c", "tau_s", "link_kib_per_s", "hang_until")),
        *((name, ctypes.c_double) for name in ("tensor_share", "pcie_bytes_per_s")),
        *((name, ctypes.c_uint64) for name in ("memory_total", "memory_used", "memory_reserved")),
        ("ecc", (ctypes.c_uint64 * 2) * 2),
        ("link_errors", (ctypes.c_uint64 * LINKS) * 3),
        ("process_memory", ctypes.c_uint64 * PROCESSES),
        ("mig", MigState * INSTANCES),
        ("process_pid", ctypes.c_uint32 * PROCESSES),
        ("process_instance", ctypes.c_uint32 * PROCESSES),
        *((name, ctypes.c_uint32) for name in ("mig_enabled", "mig_count")),
        ("link_active", ctypes.c_uint32 * LINKS),
        ("remapped", ctypes.c_uint32 * 4),
        *((name, ctypes.c_uint32) for name in ("pcie_gen", "pcie_width", "pcie_replays", "recovery_action")),
        ("pcie_errors", ctypes.c_uint32 * 2),
        ("sram_exceeded", ctypes.c_uint32),
        *((name, ctypes.c_uint32) for name in ("persistence", "lost", "forced_reasons", "counters_work")),
        *((name, ctypes.c_uint32) for name in ("profiling", "fabric_state", "fabric_status", "fabric_health")),
        ("xid", ctypes.c_uint32 * XIDS),
        ("xid_instance", ctypes.c_uint32 * XIDS),
        ("xid_count", ctypes.c_uint32),
        ("fabric_clique", ctypes.c_uint32),
        ("fabric_cluster", ctypes.c_ubyte * 16),
        *((name, ctypes.c_double) for name in ("limit_w", "updated", "temperature_c", "power_w", "scale")),
        ("energy_mj", ctypes.c_double),
        ("totals", Totals),
        ("counter_ns", ctypes.c_uint64 * 5),
        *((name, ctypes.c_uint64) for name in ("calls", "blocking_calls")),
        *((name, ctypes.c_uint32) for name in ("reasons", "sm_mhz")),
    )


class State(ctypes.Structure):
    """``struct state`` of gpu.h."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("size", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("count", "driver", "init_error", "reloads")),
        ("gpus", GpuState * MAX_GPUS),
    )


STATE_BYTES: Final = ctypes.sizeof(State)

MODEL: Final = "NVIDIA H100 80GB HBM3 (simulated)"
_COUNTERS = ("sw_power_cap", "sync_boost", "sw_thermal", "hw_thermal", "hw_power_brake")
_GIB = 1 << 30


class SimulatedGpu:
    """One GPU. Setters take effect at the next driver call of any process; getters return the state after the last."""

    def __init__(self, raw: GpuState, index: int) -> None:
        self._raw = raw
        self.index = index

    @property
    def uuid(self) -> str:
        return bytes(self._raw.uuid).decode()

    def load(self, *, utilization: float, power_watts: float, memory_ratio: float | None = None) -> None:
        """Set the load on the GPU: utilization in percent, board power, share of memory in use."""
        self._raw.utilization = utilization
        self._raw.memory_utilization = utilization * 0.6
        self._raw.demand_w = power_watts
        if memory_ratio is not None:
            self._raw.memory_used = int(memory_ratio * (self._raw.memory_total - self._raw.memory_reserved))

    @property
    def utilization(self) -> float:
        """Percent of time with a kernel running."""
        return float(self._raw.utilization)

    @utilization.setter
    def utilization(self, percent: float) -> None:
        self._raw.utilization = percent

    @property
    def memory_utilization(self) -> float:
        """Percent of time in which the memory is read or written; ``load`` sets it, too."""
        return float(self._raw.memory_utilization)

    @memory_utilization.setter
    def memory_utilization(self, percent: float) -> None:
        self._raw.memory_utilization = percent

    @property
    def power_watts(self) -> float:
        """Board power. Set: the demand of the load; get: the demand as reduced by power limit and throttling."""
        return float(self._raw.power_w)

    @power_watts.setter
    def power_watts(self, watts: float) -> None:
        self._raw.demand_w = watts

    @property
    def power_limit_watts(self) -> float:
        return float(self._raw.limit_w)

    @power_limit_watts.setter
    def power_limit_watts(self, watts: float) -> None:
        self._raw.limit_w = watts

    @property
    def cooling(self) -> float:
        """Cooling efficiency: 1 as designed, 0.6 with a failing fan or a clogged cold plate."""
        return float(self._raw.cooling)

    @cooling.setter
    def cooling(self, efficiency: float) -> None:
        self._raw.cooling = efficiency

    @property
    def thermal_tau_s(self) -> float:
        """Thermal time constant: seconds in which the die covers 63 % of the way to its equilibrium temperature."""
        return float(self._raw.tau_s)

    @thermal_tau_s.setter
    def thermal_tau_s(self, seconds: float) -> None:
        self._raw.tau_s = seconds

    @property
    def temperature(self) -> float:
        """Die temperature in degrees Celsius."""
        return float(self._raw.temperature_c)

    @temperature.setter
    def temperature(self, celsius: float) -> None:
        self._raw.temperature_c = celsius

    @property
    def sm_clock_mhz(self) -> int:
        return int(self._raw.sm_mhz)

    @property
    def throttle_reasons(self) -> int:
        """The clocks-event-reason mask; set: bits that are always on, regardless of the simulated physics."""
        return int(self._raw.reasons)

    @throttle_reasons.setter
    def throttle_reasons(self, mask: int) -> None:
        self._raw.forced_reasons = mask

    @property
    def throttle_counters_work(self) -> bool:
        """Whether the driver has the cumulative nanosecond counters of the throttle reasons."""
        return bool(self._raw.counters_work)

    @throttle_counters_work.setter
    def throttle_counters_work(self, work: bool) -> None:
        self._raw.counters_work = work

    @property
    def throttle_counters_s(self) -> dict[str, float]:
        """Those counters in seconds, by reason."""
        return dict(zip(_COUNTERS, (nanoseconds / 1e9 for nanoseconds in self._raw.counter_ns), strict=True))

    @property
    def lost(self) -> bool:
        """Whether the GPU has fallen off the bus: every call about it returns NVML_ERROR_GPU_IS_LOST."""
        return bool(self._raw.lost)

    @lost.setter
    def lost(self, lost: bool) -> None:
        self._raw.lost = lost

    @property
    def hang_s(self) -> float:
        """Calls about the GPU block until this many seconds from now; 0 releases the blocked ones."""
        return max(0.0, float(self._raw.hang_until) - time.monotonic())

    @hang_s.setter
    def hang_s(self, seconds: float) -> None:
        self._raw.hang_until = time.monotonic() + seconds

    @property
    def nvlink_bytes_per_second(self) -> float:
        """Traffic over all links, the same in each direction."""
        return float(self._raw.link_kib_per_s) * 1024

    @nvlink_bytes_per_second.setter
    def nvlink_bytes_per_second(self, rate: float) -> None:
        self._raw.link_kib_per_s = rate / 1024

    @property
    def tensor_share(self) -> float:
        """Share of the busy time in which the tensor cores are active."""
        return float(self._raw.tensor_share)

    @tensor_share.setter
    def tensor_share(self, share: float) -> None:
        self._raw.tensor_share = share

    @property
    def pcie_bytes_per_second(self) -> float:
        """Traffic over PCIe, the same in each direction."""
        return float(self._raw.pcie_bytes_per_s)

    @pcie_bytes_per_second.setter
    def pcie_bytes_per_second(self, rate: float) -> None:
        self._raw.pcie_bytes_per_s = rate

    @property
    def profiling(self) -> bool:
        """Whether the GPU has GPM (metrics of its units): Hopper and later."""
        return bool(self._raw.profiling)

    @profiling.setter
    def profiling(self, supported: bool) -> None:
        self._raw.profiling = supported

    @property
    def calls(self) -> int:
        """Driver calls about this GPU so far."""
        return int(self._raw.calls)

    @property
    def blocking_calls(self) -> int:
        """Driver calls so far that block by design (nvmlDeviceGetPcieThroughput)."""
        return int(self._raw.blocking_calls)

    def set_unsupported(self, names: Iterable[str | int]) -> None:
        """Calls (by name) and fields (by number) that return NVML_ERROR_NOT_SUPPORTED from now on."""
        self._raw.unsupported = _words(names, 512)

    def set_denied(self, names: Iterable[str]) -> None:
        """Calls that return NVML_ERROR_NO_PERMISSION from now on."""
        self._raw.denied = _words(names, 256)

    def set_ecc(self, *, corrected: int = 0, uncorrected: int = 0, aggregate: bool = False) -> None:
        """Set the ECC error counters: the volatile ones (since the driver was loaded) or the aggregate ones."""
        self._raw.ecc[aggregate][0], self._raw.ecc[aggregate][1] = corrected, uncorrected

    def set_remapped_rows(
        self, *, correctable: int = 0, uncorrectable: int = 0, pending: bool = False, failure: bool = False
    ) -> None:
        """Set the row-remapping state."""
        self._raw.remapped[:] = [correctable, uncorrectable, int(pending), int(failure)]

    def set_pcie(self, *, generation: int = 5, width: int = 16, replays: int = 0) -> None:
        """Set the state of the PCIe link."""
        self._raw.pcie_gen, self._raw.pcie_width, self._raw.pcie_replays = generation, width, replays

    def set_nvlink(self, link: int, *, active: bool = True, replay: int = 0, recovery: int = 0, crc: int = 0) -> None:
        """Set the state and the error counters of one link."""
        self._raw.link_active[link] = active
        for kind, count in enumerate((replay, recovery, crc)):
            self._raw.link_errors[kind][link] = count

    def set_pcie_errors(self, non_fatal: int, fatal: int) -> None:
        """Counters of PCIe errors that were not corrected."""
        self._raw.pcie_errors[:] = (non_fatal, fatal)

    def set_sram_exceeded(self, exceeded: bool) -> None:
        """Whether uncorrected errors of the SRAM have passed the threshold for a replacement."""
        self._raw.sram_exceeded = exceeded

    def set_recovery_action(self, action: int) -> None:
        """Set the recovery action of the driver: 0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset."""
        self._raw.recovery_action = action

    def set_fabric(self, *, state: int = 3, status: int = 0, health: int = 0) -> None:
        """Set the GPU's place in the NVLink fabric: 0 none, 1 not started, 2 in progress, 3 registered."""
        self._raw.fabric_state, self._raw.fabric_status, self._raw.fabric_health = state, status, health

    def set_domain(self, cluster: UUID, clique: int) -> None:
        """Set the NVLink domain that the GPU shares with those of other nodes."""
        self._raw.fabric_cluster[:] = cluster.bytes
        self._raw.fabric_clique = clique

    def set_processes(self, processes: Iterable[tuple[int, int] | tuple[int, int, int]]) -> None:
        """Set the compute processes as (pid, bytes of GPU memory, GPU instance if any), eight at most."""
        entries = [(*process, NO_INSTANCE)[:3] for process in processes]
        if len(entries) > PROCESSES:
            raise ValueError(f"{len(entries)} processes, a simulated GPU has room for {PROCESSES}")
        entries += [(0, 0, NO_INSTANCE)] * (PROCESSES - len(entries))
        for slot, (pid, memory, instance) in enumerate(entries):
            self._raw.process_pid[slot], self._raw.process_memory[slot] = pid, memory
            self._raw.process_instance[slot] = instance

    def partition(self, profiles: Iterable[str]) -> None:
        """Enable MIG with an instance of each profile, as "1g.10gb"; their GPU instances are 1, 2 and so on."""
        names = [*profiles]
        if len(names) > INSTANCES:
            raise ValueError(f"{len(names)} instances, a GPU has room for {INSTANCES}")
        for slot, profile in enumerate(names):
            gib = int(profile.partition(".")[2].removesuffix("gb"))
            self._raw.mig[slot] = MigState(
                uuid=_uuid("MIG", f"{self.uuid}/{slot}"),
                name=f"{MODEL} MIG {profile}".encode(),
                memory_total=gib * _GIB,
                gpu_instance=slot + 1,
                compute_instance=0,
            )
        self._raw.mig_enabled, self._raw.mig_count = 1, len(names)

    def unite(self) -> None:
        """Disable MIG."""
        self._raw.mig_enabled = self._raw.mig_count = 0

    def instance_memory(self, instance: int, used: int) -> None:
        """Set the bytes in use of the memory of a GPU instance."""
        self._raw.mig[instance - 1].memory_used = used

    def replace(self, board: int) -> None:
        """Replace the board: idle, without errors, and with the UUID of this number."""
        bus_id = self._raw.bus_id
        ctypes.memset(ctypes.addressof(self._raw), 0, ctypes.sizeof(self._raw))
        make_idle(self._raw, board)
        self._raw.bus_id = bus_id

    def raise_xid(self, code: int, instance: int = NO_INSTANCE) -> None:
        """Deliver an Xid, of a GPU instance if one is given, to every process that has registered for the events."""
        self._raw.xid_instance[self._raw.xid_count % XIDS] = instance
        self._raw.xid[self._raw.xid_count % XIDS] = code
        self._raw.xid_count += 1


def _words(names: Iterable[str | int], room: int) -> bytes:
    text = " ".join(str(name) for name in names).encode()
    if len(text) >= room:
        raise ValueError(f"the list is {len(text)} characters long, there is room for {room - 1}")
    return text


def _uuid(kind: str, of: str) -> bytes:
    digest = hashlib.sha256(of.encode()).hexdigest()
    return f"{kind}-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}".encode()


def make_idle(gpu: GpuState, index: int) -> None:
    """Set the state of an idle H100 without errors; ``index`` decides UUID and addresses."""
    gpu.uuid = _uuid("GPU", f"opsd simulated GPU {index}")
    gpu.name = MODEL.encode()
    gpu.bus_id = f"00000000:{0x1A + 0x10 * index:02X}:00.0".encode()
    gpu.serial = f"1650{index:09d}".encode()
    gpu.vbios = b"96.00.99.00.01"
    gpu.demand_w = gpu.power_w = 70.0
    gpu.cooling, gpu.ambient_c, gpu.tau_s = 1.0, 30.0, 5.0
    gpu.memory_total, gpu.memory_reserved = 80 * _GIB, _GIB // 2
    gpu.link_active[:] = [1] * LINKS
    gpu.pcie_gen, gpu.pcie_width, gpu.persistence, gpu.counters_work = 5, 16, 1, 1
    gpu.profiling, gpu.fabric_state, gpu.tensor_share = 1, 3, 0.5
    gpu.limit_w, gpu.scale, gpu.sm_mhz, gpu.reasons = 700.0, 1.0, 345, 1
    gpu.temperature_c = 30.0 + 70.0 * 0.055
    gpu.updated = time.monotonic()


# Simulated GPUs, controlled through the state file that they share with the simulated NVML library (``nvml.c``).
#
# Start the reader (the agent, nvitop) with ``OPSD_SIMULATED_NVML`` naming the state file and the built
# ``libnvidia-ml.so.1`` as its library, then change the GPUs while it runs::
#
#     library = build(folder)
#     with SimulatedGpus.create(folder / "gpus.state") as gpus:
#         gpus[3].load(utilization=98, power_watts=650)
#         gpus[3].cooling = 0.6


__all__ = ["DRIVERS", "STATE_ENV", "NoCompilerError", "SimulatedGpus", "SimulationError", "build"]

STATE_ENV: Final = "OPSD_SIMULATED_NVML"
DRIVERS: Final = (570, 575, 580)
"""Driver generations whose field numbers can be simulated."""


class SimulatedGpus:
    """The GPUs of one state file. Use ``create`` to make the file, ``open`` for an existing one."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._state = State.from_buffer(mapping)
        self._gpus = [SimulatedGpu(self._state.gpus[i], i) for i in range(self._state.count)]

    @classmethod
    def create(cls, path: Path, *, count: int = 8, driver: int = 580) -> Self:
        """Write a new state file of ``count`` idle H100 GPUs under a driver of the numbering ``driver``.

        Raises ValueError for a count or driver that cannot be simulated, OSError if the file cannot be written.
        """
        if not 0 <= count <= MAX_GPUS:
            raise ValueError(f"{count} GPUs cannot be simulated, only 0 to {MAX_GPUS}")
        if driver not in DRIVERS:
            raise ValueError(f"driver {driver} cannot be simulated, only {', '.join(map(str, DRIVERS))}")
        state = State(magic=MAGIC, version=VERSION, size=STATE_BYTES, count=count, driver=driver)
        for index in range(count):
            make_idle(state.gpus[index], index)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(bytes(state))
        draft.rename(path)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map an existing state file. Raises SimulationError if it is not one, OSError if it cannot be read."""
        with open(path, "r+b") as file:
            if os.fstat(file.fileno()).st_size != STATE_BYTES:
                raise SimulationError(f"{path} is not a state file of simulated GPUs of this opsd release")
            mapping = mmap.mmap(file.fileno(), STATE_BYTES)
        header = State.from_buffer_copy(mapping)
        if (header.magic, header.version, header.size) != (MAGIC, VERSION, STATE_BYTES):
            mapping.close()
            raise SimulationError(f"{path} is not a state file of simulated GPUs of layout {VERSION}")
        return cls(path, mapping)

    def __getitem__(self, index: int) -> SimulatedGpu:
        return self._gpus[index]

    def __iter__(self) -> Iterator[SimulatedGpu]:
        return iter(self._gpus)

    def __len__(self) -> int:
        return len(self._gpus)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def environment(self, library: Path) -> dict[str, str]:
        """Variables that make any NVML client see these GPUs through ``library``."""
        return {STATE_ENV: str(self.path), "LD_LIBRARY_PATH": str(library.parent)}

    def fail_init(self, code: int) -> None:
        """Make nvmlInit return ``code`` from now on, for instance 18 (driver/library mismatch); 0 makes it succeed."""
        self._state.init_error = code

    def reload_driver(self) -> None:
        """Make every client's session invalid until it calls nvmlInit again, as after a reload of the driver."""
        self._state.reloads += 1

    def close(self) -> None:
        """Close the file; it stays on disk for its other users. GPU objects taken from here before keep working."""
        self._gpus.clear()
        del self._state


LIBRARY: Final = "libnvidia-ml.so.1"

_FOLDER = Path(__file__).parent
SOURCES: Final = ("nvml.c", "fields.h", "gpm.h", "session.h", "gpu.h")


class NoCompilerError(Exception):
    """The machine has no C compiler, so the simulated NVML cannot be built."""


class SimulationError(Exception):
    """The simulated NVML cannot be built or its state file cannot be used; the message says why."""


def build(folder: Path, path: str | None = None) -> Path:
    """Compile the simulated NVML into ``folder`` and return the path of its ``libnvidia-ml.so.1``.

    A library built before from the same source is reused. ``path`` is the search path for the compiler, by default
    PATH. Raises NoCompilerError without ``cc`` or ``gcc`` there, SimulationError if the compiler fails,
    OSError if the folder cannot be written.
    """
    source = b"".join((_FOLDER / name).read_bytes() for name in SOURCES)
    library = folder / f"nvml-{hashlib.sha256(source).hexdigest()[:16]}" / LIBRARY
    if library.exists():
        return library
    compiler = shutil.which("cc", path=path) or shutil.which("gcc", path=path)
    if compiler is None:
        raise NoCompilerError("no C compiler (cc or gcc) on the PATH; install one, for instance: apt-get install gcc")
    library.parent.mkdir(parents=True, exist_ok=True)
    draft = library.with_name(f".{LIBRARY}.{os.getpid()}")
    command = [compiler, "-std=c11", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", str(draft)]
    result = subprocess.run(
        [*command, str(_FOLDER / SOURCES[0]), "-lm", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if result.returncode != 0:
        raise SimulationError(f"{compiler} cannot compile {_FOLDER / SOURCES[0]}: {result.stderr.strip()[-2000:]}")
    draft.rename(library)
    return library
