"""The kernel log's records and device: any bytes, a missing device, a ring that overwrites what was not read."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import NoData
from opsd.collectors.kmsg import KmsgCollector
from opsd.collectors.lib.kernel.log import KernelLog, KernelLogDevice, parse_record
from tests.fakes.kernel_log import RingLog
from tests.fakes.kmsg import XID_31, Node, codes, read, values


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_overwritten_records_are_counted(node: Node) -> None:
    """What the ring overwrote before it was read is counted as lost, and reading goes on."""
    node.log = RingLog(size=10)
    agent = node.agent()
    node.say("first")
    read(agent)
    for _ in range(25):
        node.say("noise")
    node.say(XID_31)
    reading = read(agent)
    assert codes(reading) == [31]
    assert values(reading, "opsd_kmsg_dropped_total")["overrun",] == 16
    assert values(reading, "opsd_kmsg_records_total")[()] == 10


def test_no_log_is_no_data(node: Node) -> None:
    """A container without /dev/kmsg and a missing permission are absences that say what to do."""
    missing = node.agent(open_device=KernelLogDevice, path=node.folder / "kmsg").collect()
    assert isinstance(missing, NoData)
    assert "kmsg does not exist" in missing.reason

    def refuse(path: Path) -> KernelLogDevice:
        raise PermissionError(errno.EPERM, "no", str(path))

    refused = node.agent(open_device=refuse).collect()
    assert isinstance(refused, NoData)
    assert "CAP_SYSLOG" in refused.reason
    assert not node.ledger.kernel_log


def test_a_log_that_fails_is_an_error(node: Node) -> None:
    """An error of the device is neither silence nor health; a record too long for the buffer is passed over."""

    class Failing:
        errors = [errno.EINVAL, errno.EIO]  # noqa: RUF012

        def read(self) -> bytes:
            raise OSError(self.errors.pop(0), "failed")

    log = KernelLog(Failing(), last=None)
    with pytest.raises(OSError, match="failed") as caught:
        list(log.read(10))
    assert (caught.value.errno, log.malformed) == (errno.EIO, 1)


@given(st.lists(st.binary(), max_size=30))
def test_any_bytes_can_be_in_the_log(records: list[bytes]) -> None:
    """Whatever the log holds, reading never raises, and what is no record is counted."""
    ring = RingLog()
    for record in records:
        ring.write_raw(record)
        ring.write_raw(b"6,1,5,-;" + record)
    log = KernelLog(ring(Path()), last=None)
    for record in log.read(1000):
        assert record.text.replace("\n", "").isprintable()
    assert log.drained


@given(st.binary())
def test_a_record_is_parsed_or_refused(raw: bytes) -> None:
    """Parsing bytes gives a record whose text can be shown, or ValueError."""
    for candidate in (raw, b"6,1,5,-;" + raw, b"9" * 400 + b",1,1,-;" + raw):
        with contextlib.suppress(ValueError):
            assert parse_record(candidate).text.replace("\n", "").isprintable()


def test_a_record_of_a_real_kernel() -> None:
    """Priority, sequence, time, text: read as documented, without the dictionary lines that follow."""
    record = parse_record(b"30,1234,5678901,-;usb 1-1: new\\x0adevice\n SUBSYSTEM=usb\n DEVICE=c189:1\n")
    assert record == (3, 1234, 5.678901, False, "usb 1-1: new\ndevice")


def test_a_device_is_read_without_waiting(tmp_path: Path) -> None:
    """The real reader returns what there is and says so if there is nothing, with and without a writer."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    device = KernelLogDevice(path)
    with pytest.raises(BlockingIOError):
        device.read()
    writer = os.open(path, os.O_WRONLY)
    for record in (b"6,1,0,-;one\n", b"6,2,0,-;two\n"):
        os.write(writer, record)
        assert device.read() == record
    with pytest.raises(BlockingIOError):
        device.read()
    os.close(writer)


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg may not be read here")
def test_the_log_of_this_machine(tmp_path: Path) -> None:
    """The real log is read to its end, every record is understood, and a second look repeats nothing."""
    state = tmp_path / "kmsg.json"
    state.write_text('{"boot_id": "another boot", "sequence": 1}')
    collector = KmsgCollector(state, max_records=10_000_000)
    first, second = read(collector), read(collector)
    assert values(first, "opsd_kmsg_records_total")[()] > 0
    assert values(first, "opsd_kmsg_dropped_total")["malformed",] == 0
    assert not set(map(str, first.events)) & set(map(str, second.events))
