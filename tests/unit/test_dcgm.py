"""DCGM: its exporter, its host engine, and what counts beside the driver."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opsd.collectors.base import GpuFact, Metric, NoData, Reading, Sample
from opsd.collectors.dcgm import DIFFER_S, ENGINE_UP, SERIES, UP, Comparison, DcgmCollector, DcgmError, parse_exposition
from opsd.collectors.lib.dcgm_engine import EngineError, HostEngine, Reader, check_connections, find_bindings, runs
from opsd.collectors.lib.listener import UntrustedError, trusted_uids
from opsd.collectors.lib.nvml.series import GPU_TEMP, PCIE_REPLAYS, REMAP_FAILURE, SM_CLOCK, Identity

# The DCGM collector against a small HTTP server, and whom it believes.


OWN = trusted_uids(())

LABELS = (
    'gpu="0",UUID="GPU-1",pci_bus_id="00000000:1B:00.0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",'
    'Hostname="n1",DCGM_FI_DRIVER_VERSION="570.86"'
)

PAGE = f"""\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{LABELS}}} 1980
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{{{LABELS}}} 61
# HELP DCGM_FI_DEV_MEMORY_TEMP Memory temperature (in C).
# TYPE DCGM_FI_DEV_MEMORY_TEMP gauge
DCGM_FI_DEV_MEMORY_TEMP{{{LABELS}}} 9223372036854775794
# HELP DCGM_FI_DEV_PCIE_REPLAY_COUNTER Total number of PCIe retries.
# TYPE DCGM_FI_DEV_PCIE_REPLAY_COUNTER counter
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{LABELS}}} 3
# HELP DCGM_FI_PROF_PIPE_TENSOR_ACTIVE Ratio of cycles the tensor (HMMA) pipe is active.
# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{LABELS}}} 0.41
# HELP DCGM_EXP_SOMETHING Not taken over.
# TYPE DCGM_EXP_SOMETHING gauge
DCGM_EXP_SOMETHING{{{LABELS}}} 1
"""

KEY = ("0", "GPU-1", "00000000:1B:00.0", "nvidia0", "NVIDIA H100 80GB HBM3", "n1", "n1")


class Exporter(BaseHTTPRequestHandler):
    """Answers with what the server holds; a page of None hangs until the server ends."""

    server: ExporterServer

    def do_GET(self) -> None:
        self.server.asked += 1
        if self.server.page is None:
            self.server.over.wait(30)
            return
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.page.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class ExporterServer(ThreadingHTTPServer):
    """dcgm-exporter on a port of its own."""

    page: str | None = PAGE
    status = 200
    asked = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Exporter)
        self.over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/metrics"


@pytest.fixture
def exporter() -> Iterator[ExporterServer]:
    server = ExporterServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()
    thread.join(30)


@pytest.mark.parametrize("host", ["Hostname", "hostname"])
def test_the_exporters_series_are_taken_over(exporter: ExporterServer, host: str) -> None:
    """Names, labels and values are the same as the NVML collector's would be, with both names of the host's label."""
    exporter.page = PAGE.replace("Hostname", host)
    collector = DcgmCollector(exporter.url, uids=OWN)
    reading = collector.collect()
    assert isinstance(reading, Reading)
    found = {(sample.metric.name, sample.labels): sample.value for sample in reading.samples}
    assert found.pop(("opsd_dcgm_exporter_up", ())) == 1
    assert found.pop(("opsd_dcgm_engine_up", ())) == 0
    assert found.pop(("opsd_dcgm_untrusted", ())) == 0
    assert found == {
        (SM_CLOCK.name, KEY): 1980,
        (GPU_TEMP.name, KEY): 61,
        (PCIE_REPLAYS.name, KEY): 3,
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", KEY): 0.41,
    }
    assert collector.covered == {name for name, _ in found}
    assert {sample.metric for sample in reading.samples} <= set(collector.metrics)


def test_numbers_that_mean_not_supported_are_left_out() -> None:
    """DCGM's blanks are huge numbers; a memory of 9e18 degrees must not reach anybody."""
    page = "DCGM_FI_DEV_GPU_TEMP {}\nDCGM_FI_DEV_POWER_USAGE {}\n"
    assert list(parse_exposition(page.format(9223372036854775792, 140737488355330.0))) == []


def test_each_series_comes_once() -> None:
    """MIG instances and other labels would make duplicates, which Prometheus refuses."""
    mig = LABELS.replace('gpu="0"', 'gpu="0",GPU_I_ID="1"')
    page = "".join(
        f"DCGM_FI_DEV_GPU_TEMP{{{labels}}} {value}\n" for labels, value in ((mig, 50), (LABELS, 61), (LABELS, 7))
    )
    assert [sample.value for sample in parse_exposition(page)] == [61]


def test_it_is_asked_at_its_own_pace(exporter: ExporterServer) -> None:
    """Between two questions the last answer stands."""
    now = 0.0
    collector = DcgmCollector(exporter.url, uids=OWN, period_s=5.0, clock=lambda: now)
    first = collector.collect()
    now = 4.9
    assert collector.collect() is first
    now = 5.0
    collector.collect()
    assert exporter.asked == 2


def test_no_exporter_is_an_expected_absence() -> None:
    """Without dcgm-exporter nothing is covered."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/metrics"
    collector = DcgmCollector(url)
    assert collector.collect() == NoData(f"no dcgm-exporter at {url}, and no DCGM host engine")
    assert collector.covered == frozenset()


@pytest.mark.parametrize("trouble", ["hangs", "fails", "garbage"])
def test_trouble_uncovers_the_series(exporter: ExporterServer, trouble: str) -> None:
    """An exporter that stops answering is an error, within the timeout, and covers nothing then."""
    now = 0.0
    collector = DcgmCollector(exporter.url, uids=OWN, timeout_s=0.5, clock=lambda: now)
    collector.collect()
    assert collector.covered
    exporter.page = {"hangs": None, "fails": PAGE, "garbage": 'DCGM_FI_DEV_GPU_TEMP{gpu="0} 61 x\n'}[trouble]
    exporter.status = 500 if trouble == "fails" else 200
    now, began = 10.0, time.monotonic()
    with pytest.raises(DcgmError) as caught:
        collector.collect()
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 20
    assert collector.covered == frozenset()
    asked, now = exporter.asked, 14.9
    with pytest.raises(DcgmError, match=re.escape(str(caught.value))):  # or it would seem to recover and fail again
        collector.collect()
    assert exporter.asked == asked
    exporter.page, exporter.status, now = PAGE, 200, 15.0
    assert isinstance(collector.collect(), Reading)


def test_another_users_exporter_is_not_believed(exporter: ExporterServer) -> None:
    """It is asked nothing; that it is there shows, and why nothing comes of it."""
    collector = DcgmCollector(exporter.url, uids=frozenset({os.geteuid() + 1}))
    reading = collector.collect()
    assert isinstance(reading, Reading)
    assert {s.metric.name: s.value for s in reading.samples} == {
        "opsd_dcgm_exporter_up": 0.0, "opsd_dcgm_engine_up": 0.0, "opsd_dcgm_untrusted": 1.0,
    }  # fmt: skip
    assert collector.beside(reading, Reading())[1].endswith(f"belongs to user {os.geteuid()}, who is not believed")
    assert (exporter.asked, collector.covered) == (0, frozenset())


# The DCGM host engine through its bindings: a folder of modules that behave as DCGM's do.


TEMPERATURE, CLOCK = 150, 100

NAMES = {TEMPERATURE: GPU_TEMP.name, CLOCK: SM_CLOCK.name}


class FakeReader:
    """Two GPUs; DCGM leaves out what it has no value for."""

    m_gpuIdToUUId: Mapping[int, Any] = {0: "GPU-a", 1: b"GPU-b"}
    m_gpuIdToBusId: Mapping[int, Any] = {0: "0000:1B:00.0", 1: "0000:1C:00.0"}

    def __init__(self) -> None:
        self.values: Mapping[int, Mapping[int, Any]] = {0: {TEMPERATURE: 61, CLOCK: 1980}, 1: {TEMPERATURE: 55}}
        identifiers = SimpleNamespace(deviceName="NVIDIA H100 80GB HBM3")
        attributes = SimpleNamespace(identifiers=identifiers)
        self.m_dcgmSystem = SimpleNamespace(discovery=SimpleNamespace(GetGpuAttributes=lambda _gpu: attributes))

    def Init(self) -> None: ...

    def GetLatestGpuValuesAsFieldIdDict(self) -> Mapping[int, Mapping[int, Any]]:
        if not isinstance(self.values, Mapping):
            raise self.values
        return self.values


@pytest.fixture
def bindings(tmp_path: Path) -> Path:
    (tmp_path / "DcgmReader.py").touch(0o644)
    return tmp_path


def engine(folder: Path, reader: FakeReader, *, running: bool = True) -> HostEngine:
    def make(_folder: Path, names: Sequence[str]) -> tuple[Reader, dict[int, str]]:
        assert GPU_TEMP.name in names
        assert not any(name.startswith("DCGM_FI_PROF_") for name in names)
        return reader, NAMES

    return HostEngine(SERIES, folders=(folder,), running=lambda: running, make=make, hostname="n1")


def collector(engine: HostEngine) -> DcgmCollector:
    return DcgmCollector("http://127.0.0.1:9/metrics", period_s=0.0, engine=engine)


def test_the_engine_gives_the_same_samples_as_the_exporter(bindings: Path) -> None:
    """Names and labels are the exporter's; what is covered is no longer asked of the driver."""
    dcgm = collector(engine(bindings, FakeReader()))
    reading = dcgm.collect()
    assert isinstance(reading, Reading)
    values = {(sample.metric.name, sample.labels[:3]): sample.value for sample in reading.samples[3:]}
    assert values == {
        (GPU_TEMP.name, ("0", "GPU-a", "0000:1B:00.0")): 61.0,
        (SM_CLOCK.name, ("0", "GPU-a", "0000:1B:00.0")): 1980.0,
        (GPU_TEMP.name, ("1", "GPU-b", "0000:1C:00.0")): 55.0,
    }
    assert reading.samples[-1].labels[3:] == ("nvidia1", "NVIDIA H100 80GB HBM3", "n1", "n1")
    assert {sample.metric: sample.value for sample in reading.samples[:2]} == {UP: 0.0, ENGINE_UP: 1.0}
    assert dcgm.covered == {GPU_TEMP.name, SM_CLOCK.name}


@pytest.mark.parametrize("running", [True, False])
def test_without_engine_or_bindings_there_is_nothing(tmp_path: Path, running: bool) -> None:
    """A port that answers without bindings is as little use as bindings without an engine."""
    folder = tmp_path / "absent" if running else tmp_path
    (tmp_path / "DcgmReader.py").touch(0o644)
    assert isinstance(collector(engine(folder, FakeReader(), running=running)).collect(), NoData)


@pytest.mark.parametrize("values", [{}, RuntimeError("DCGM_ST_CONNECTION_NOT_VALID")])
def test_an_engine_that_tells_nothing_is_an_error(bindings: Path, values: Any) -> None:
    """Not healthy, and not absent; the driver is asked for everything meanwhile, and the engine again the next time."""
    reader = FakeReader()
    reader.values = values
    dcgm = collector(engine(bindings, reader))
    with pytest.raises(DcgmError, match="DCGM host engine"):
        dcgm.collect()
    assert dcgm.covered == frozenset()
    reader.values = {0: {TEMPERATURE: 60}}
    assert isinstance(dcgm.collect(), Reading)


def test_bindings_that_anybody_can_write_are_not_loaded(bindings: Path) -> None:
    """The agent may be root, and loads what is in that folder."""
    assert find_bindings((bindings,)) == bindings
    (bindings / "DcgmReader.py").chmod(0o666)
    assert find_bindings((bindings,)) is None


def test_nobody_listens_where_there_is_no_engine() -> None:
    """Looked for by its port, before anything is loaded."""
    assert not runs(trusted_uids(()), ("127.0.0.1", 9))


def test_the_bindings_are_loaded_as_dcgm_ships_them(tmp_path: Path) -> None:
    """Modules that import each other by bare names, a class that is told the fields; in a process of its own."""
    (tmp_path / "dcgm_fields.py").write_text(f"{GPU_TEMP.name} = {TEMPERATURE}\n")
    (tmp_path / "DcgmReader.py").write_text(
        textwrap.dedent("""
            import dcgm_fields
            class DcgmReader:
                def __init__(self, hostname, fieldIds, updateFrequency, maxKeepAge, fieldGroupName):
                    self.told = (hostname, fieldIds, updateFrequency, fieldGroupName[:5])
                def Init(self):
                    print(self.told)
        """)
    )
    program = (
        "import sys; from pathlib import Path; from opsd.collectors.lib.dcgm_engine import new_reader; "
        f"print(new_reader(Path(sys.argv[1]), [{GPU_TEMP.name!r}, 'DCGM_FI_DEV_UNKNOWN'])[1])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"('localhost', [{TEMPERATURE}], 1000000, 'opsd_')",
        f"{{{TEMPERATURE}: {GPU_TEMP.name!r}}}",
    ]


def test_broken_bindings_are_one_sentence(tmp_path: Path) -> None:
    """Whatever they raise; DCGM has an exception class for every status."""
    (tmp_path / "DcgmReader.py").write_text("raise OSError('libdcgm.so.4 is missing')\n")
    with pytest.raises(EngineError, match="cannot be read"):
        HostEngine(SERIES, folders=(tmp_path,), running=lambda: True).read()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a socket is given to another user")
def test_another_users_engine_is_not_believed() -> None:
    """Neither before the bindings connect nor after: they connect by themselves."""
    own, others = trusted_uids(()), frozenset({65533})
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address), server.accept()[0] as accepted:
            check_connections(own, address[1])
            os.fchown(accepted.fileno(), 65534, -1)
            with pytest.raises(UntrustedError, match="belongs to user 65534"):
                check_connections(own, address[1])
            check_connections(own, address[1] - 1)
        with pytest.raises(UntrustedError):
            runs(others, address)
    assert not runs(own, address)


def test_an_engine_that_is_not_believed_is_none(bindings: Path) -> None:
    """Its bindings are not used; that it is there shows."""

    def running() -> bool:
        raise UntrustedError("what listens there belongs to user 65534, who is not believed")

    dcgm = collector(HostEngine({}, folders=[bindings], running=running))
    reading = dcgm.collect()
    assert isinstance(reading, Reading)
    assert {s.metric.name: s.value for s in reading.samples}["opsd_dcgm_untrusted"] == 1.0
    assert dcgm.beside(reading, Reading())[1].endswith("is not believed")


# DCGM beside the driver: what counts, what it is called, and where the two disagree.


NODE = "n1"

GPUS = tuple(GpuFact(index, f"GPU-{index}", f"0000:0{index}:00.0", "H100") for index in range(2))

EXPORTER_UP = Metric("opsd_dcgm_exporter_up", "x")


def own(metric: Metric, gpu: GpuFact, value: float) -> Sample:
    """The driver's sample."""
    return Sample(metric, value, Identity(gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.model).labels(metric, NODE))


def told(metric: Metric, uuid: str, value: float, index: int = 0) -> Sample:
    """DCGM's, by labels of its own."""
    return Sample(metric, value, (str(index), uuid, "1B", "x", "NVIDIA H100", "box", "box"))


def test_the_drivers_value_counts_and_the_rest_is_added_by_its_labels() -> None:
    """Of each GPU by itself: one that the driver says nothing of hides nothing of the other."""
    driver = Reading((own(GPU_TEMP, GPUS[0], 60.0),), facts=GPUS)
    samples = [
        Sample(EXPORTER_UP, 1.0),
        told(GPU_TEMP, "GPU-0", 99.0),
        told(GPU_TEMP, "GPU-1", 55.0, 1),
        told(SM_CLOCK, "GPU-0", 9),
    ]
    kept, wrong = Comparison((), NODE).merge(samples, driver, 0.0)
    assert kept == [Sample(EXPORTER_UP, 1.0), own(GPU_TEMP, GPUS[1], 55.0), own(SM_CLOCK, GPUS[0], 9.0)]
    assert wrong == ()


def test_without_a_driver_dcgm_speaks_alone() -> None:
    """Its samples are as they came."""
    samples = [told(GPU_TEMP, "GPU-7", 99.0)]
    assert Comparison((), NODE).merge(samples, Reading(), 0.0) == (samples, ())


def test_a_gpu_that_the_driver_does_not_know_is_left_out_and_named() -> None:
    """So is one of another index, whose values are kept by the driver's."""
    samples = [told(GPU_TEMP, "GPU-7", 99.0), told(GPU_TEMP, "GPU-1", 55.0, 5)]
    kept, wrong = Comparison((), NODE).merge(samples, Reading(facts=GPUS), 0.0)
    assert kept == [own(GPU_TEMP, GPUS[1], 55.0)]
    assert wrong == ("GPU-7, which the driver does not know", "the index of GPU-1")


def test_values_that_hardly_change_must_agree_within_minutes() -> None:
    """What one source is late with is no difference; nor is one that ends in between."""
    comparison = Comparison({REMAP_FAILURE.name}, NODE)
    driver = Reading((own(REMAP_FAILURE, GPUS[0], 0.0), own(GPU_TEMP, GPUS[0], 60.0)), facts=GPUS)
    says = {value: [told(REMAP_FAILURE, "GPU-0", value), told(GPU_TEMP, "GPU-0", 99.0)] for value in (0.0, 1.0)}

    def wrong(value: float, now: float) -> tuple[str, ...]:
        return comparison.merge(says[value], driver, now)[1]

    assert wrong(1.0, 0.0) == wrong(1.0, DIFFER_S - 1) == wrong(0.0, DIFFER_S) == wrong(1.0, DIFFER_S + 1) == ()
    assert wrong(1.0, 2 * DIFFER_S + 1) == ("DCGM_FI_DEV_ROW_REMAP_FAILURE of GPU-0",)
