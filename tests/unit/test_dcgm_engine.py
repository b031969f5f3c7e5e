"""The DCGM host engine through its bindings: a folder of modules that behave as DCGM's do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opsd.collectors.base import NoData, Reading
from opsd.collectors.dcgm import ENGINE_UP, SERIES, UP, DcgmCollector, DcgmError
from opsd.collectors.lib.dcgm_engine import EngineError, HostEngine, Reader, check_connections, find_bindings, runs
from opsd.collectors.lib.listener import UntrustedError, trusted_uids
from opsd.collectors.lib.nvml.series import GPU_TEMP, SM_CLOCK

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
