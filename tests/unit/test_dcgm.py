"""The DCGM collector against a small HTTP server, and whom it believes."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from opsd.collectors.base import NoData, Reading
from opsd.collectors.dcgm import DcgmCollector, DcgmError, parse_exposition
from opsd.collectors.lib.listener import trusted_uids
from opsd.collectors.lib.nvml.series import GPU_TEMP, PCIE_REPLAYS, SM_CLOCK

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
