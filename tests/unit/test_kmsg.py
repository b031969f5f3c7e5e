"""The kernel log: its records, its position over restarts, and what becomes of each line."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import NoData, Reading
from opsd.collectors.kmsg import KmsgCollector
from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.collectors.lib.kernel.messages import KernelLog, KernelLogDevice, parse_record
from opsd.collectors.lib.kernel.xid import COUNTED
from tests.fakes.kmsg import FALLEN, GPU, XID_31, XID_79, Node, RingLog, codes, read, values

# The kernel log: what stands in it becomes events and counts, each thing once.


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_an_xid_becomes_an_event_and_a_count(node: Node) -> None:
    """An Xid in the log is reported at once, with process and action, and counted for its GPU."""
    agent = node.agent()
    read(agent)
    node.clock.advance(1)
    node.say(XID_31)
    node.clock.advance(1)
    reading = read(agent)
    (event,) = reading.events
    assert event.message == f"Xid 31 on {GPU} by python 89: Ch 00000018, MMU Fault"
    assert (event.kind, event.at, event.data["action"]) == ("xid", 50_001.0, "restart_app")
    assert node.ledger.kernel_log
    assert values(reading, "opsd_xid_total")[GPU, "31"] == 1


def test_counters_stand_at_zero_from_the_start(node: Node) -> None:
    """Every GPU and switch of the driver, every kind of trouble and every reason for a loss has its series at 0."""
    node.device("nvidia/gpus", "0000:3b:00.0")
    node.device("nvidia-nvswitch/devices", "0000:05:00.0")
    node.device("nvidia/gpus", "unexpected")
    reading = read(node.agent())
    assert values(reading, "opsd_xid_total") == {(GPU, code): 0 for code in (*map(str, COUNTED), "other")}
    assert set(values(reading, "opsd_sxid_total")) == {
        ("00000000:05:00.0", severity) for severity in ("fatal", "non_fatal", "correctable", "unknown")
    }
    assert set(values(reading, "opsd_kernel_events_total").values()) == {0}
    assert values(reading, "opsd_kmsg_dropped_total") == {("overrun",): 0, ("malformed",): 0, ("crowded",): 0}


def test_a_flood_is_read_in_bounded_portions(node: Node) -> None:
    """A flood costs a bounded number of reads per collection and becomes one event with a count."""
    agent = node.agent(max_records=1000)
    read(agent)
    for _ in range(2500):
        node.say(XID_31)
    readings = [read(agent) for _ in range(4)]
    assert [[event.data["count"] for event in reading.events] for reading in readings] == [[1000], [1000], [500], []]
    assert values(readings[-1], "opsd_xid_total")[GPU, "31"] == 2500


def test_ten_thousand_records_a_second_are_kept_up_with(node: Node) -> None:
    """A collection reads what such a flood brings in a second, and finds the one line that matters in it."""
    agent = node.agent()
    read(agent)
    for second in range(2):
        for number in range(9_999):
            node.say(f"usb 1-1: reset high-speed USB device number {number}")
        node.say(XID_79)
        reading = read(agent)
        assert codes(reading) == [79]
        assert values(reading, "opsd_kmsg_records_total")[()] == 10_000 * (second + 1)


def test_too_many_different_events_are_cut_and_counted(node: Node) -> None:
    """No collection returns more events than it may; the others are counted, as kinds and as crowded out."""
    agent = node.agent(max_events=5)
    read(agent)
    for pid in range(8):
        node.say(f"python[{pid}]: segfault at 0 ip 0 sp 0 error 4")
    reading = read(agent)
    assert [event.data["pid"] for event in reading.events] == [0, 1, 2, 3, 4]
    assert values(reading, "opsd_kernel_events_total")["segfault",] == 8
    assert values(reading, "opsd_kmsg_dropped_total")["crowded",] == 3


def test_a_fallen_gpu_is_one_xid(node: Node) -> None:
    """The driver says twice that a GPU has fallen off the bus; without a number it still is Xid 79."""
    agent = node.agent()
    read(agent)
    node.say(XID_79)
    node.say(FALLEN)
    reading = read(agent)
    assert codes(reading) == [79]
    assert values(reading, "opsd_xid_total")[GPU, "79"] == 1
    node.clock.advance(60)
    node.say(FALLEN)
    (event,) = read(agent).events
    assert (event.data["code"], event.data["inferred"], event.data["action"]) == (79, True, "reboot_node")


def test_what_nvml_told_already_is_not_told_again(node: Node) -> None:
    """An Xid that another source has reported is neither an event nor a count of the kernel log's."""
    agent = node.agent()
    read(agent)
    node.ledger.report(31, GPU, at=node.clock.wall(), source="nvml")
    node.say(XID_31)
    reading = read(agent)
    assert codes(reading) == []
    assert values(reading, "opsd_xid_total")[GPU, "31"] == 1


def test_xids_that_a_site_ignores_are_counted_only(node: Node) -> None:
    """Whichever source tells of them; others are events as ever."""
    node.ledger.ignored = frozenset({31})
    agent = node.agent()
    read(agent)
    node.say(XID_31)
    node.say(XID_79)
    reading = read(agent)
    assert codes(reading) == [79]
    assert values(reading, "opsd_xid_total")[GPU, "31"] == 1


def test_processes_cannot_forge_messages(node: Node) -> None:
    """What a process writes into the log is ignored, except where faults are injected to try things out."""
    agent = node.agent()
    read(agent)
    node.say(XID_79, facility=1)
    assert codes(read(agent)) == []
    trying = node.agent(injected=True)
    read(trying)
    node.say(XID_79, facility=1)
    assert codes(read(trying)) == [79]


def test_a_message_in_two_pieces_is_put_together(node: Node) -> None:
    """A line cut inside its number is nothing by itself and an Xid once the rest has come."""
    agent = node.agent()
    read(agent)
    node.say("NVRM: Xid (PCI:0000:3b:00): 7")
    assert codes(read(agent)) == []
    node.say("9, GPU has fallen off the bus.", flag="c")
    assert codes(read(agent)) == [79]
    node.say("NVRM: Xid (PCI:0000:3b:00): 7")
    node.say("9, unrelated")
    assert codes(read(agent)) == []
    node.say("nfs: server 10.0.0.1 ")
    node.say("not responding, still trying", flag="+")
    assert [event.message for event in read(agent).events] == ["nfs: server 10.0.0.1 not responding, still trying"]


def test_a_piece_without_its_beginning_is_nothing(node: Node) -> None:
    """Another processor's message may separate the name of a cpuset, any text of a user's, from what it continues."""
    agent = node.agent()
    read(agent)
    node.say(XID_31)
    node.say(XID_79, flag="c")
    node.say(XID_79[:30], flag="c")
    node.say(XID_79[30:], flag="c")
    node.say("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=")
    node.say("usb 1-1: reset high-speed USB device number 2")
    node.say(XID_79, flag="c")
    assert codes(read(agent)) == [31]


def test_the_oom_killer_names_process_and_cgroup(node: Node) -> None:
    """An out-of-memory kill is one event that says who was killed in which cgroup."""
    agent = node.agent()
    read(agent)
    node.say(
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg=/job_42,"
        "task_memcg=/job_42/step_0,task=python,pid=77,uid=1000"
    )
    read(agent)
    node.say("Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:2kB, file-rss:0kB")
    reading = read(agent)
    (event,) = reading.events
    assert {"pid": 77, "process": "python", "cgroup": "/job_42/step_0"}.items() <= event.data.items()
    assert values(reading, "opsd_kernel_events_total")["oom_kill",] == 1


@pytest.mark.parametrize(
    ("group", "job"), [("job_42", "42"), ("sEKNKTV3WPV500", "71"), ("sEKNKTV3WPV501", ""), ("system", "")]
)
def test_the_victim_s_control_group_names_its_job(node: Node, group: str, job: str) -> None:
    """By its number, or by a SLUID that Slurm has told."""
    gpu_owners = GpuOwners()
    gpu_owners.sluids = {"sEKNKTV3WPV500": "71"}
    agent = node.agent(gpu_owners=gpu_owners)
    read(agent)
    of = f"task_memcg=/system.slice/slurmstepd.scope/{group}/step_0/user/task_0,task=python,pid=77,uid=1000"
    node.say(f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg=/a,{of}")
    node.say("Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:2kB, file-rss:0kB")
    (event,) = read(agent).events
    assert event.data["job"] == job


def test_a_cpuset_cannot_name_another_job_as_the_victims(node: Node) -> None:
    """Its name is a piece of the message; with a process called like the beginning it is not whole either."""
    agent = node.agent()
    read(agent)
    forged = "task_memcg=/slurm/uid_0/job_42/step_0,task=a,pid=77,uid=0"
    node.say("usb 1-1: reset high-speed USB device number 2")
    node.say(f"oom-kill:constraint=x,{forged}", flag="c")
    node.say(f"oom-kill:[77]: segfault at 0 ip 0 sp 0 error 4 in ,{forged}[7f88+1000]")
    node.say("Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:2kB, file-rss:0kB")
    events = read(agent).events
    assert [(event.kind, event.data.get("cgroup")) for event in events] == [("segfault", None), ("oom_kill", "")]


def test_sxids_count_by_severity(node: Node) -> None:
    """An NVSwitch's error is an event with its link, counted by severity; the lines of data after it are not."""
    agent = node.agent()
    read(agent)
    switch = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, "
    node.say(switch + "Fatal, Link 60 sourcetrack timeout error (First)")
    node.say(switch + "Severity 1 Engine instance 60 Sub-engine instance 00")
    reading = read(agent)
    (event,) = reading.events
    assert {"code": 24007, "link": 60, "severity": "fatal", "count": 1}.items() <= event.data.items()
    assert values(reading, "opsd_sxid_total")["00000000:C1:00.0", "fatal"] == 1


def test_an_xid_names_the_job_of_its_process(node: Node) -> None:
    """As it was when the process last held a GPU: by now it may be gone."""
    gpu_owners = GpuOwners()
    gpu_owners.jobs_of = {89: "72"}
    agent = node.agent(gpu_owners=gpu_owners)
    read(agent)
    node.say(XID_31)
    node.say(XID_79)
    assert [event.data.get("job") for event in read(agent).events] == ["72", None]


# Where the reader of the kernel log stands: kept over restarts, worthless after a boot; and how events are dated.


def test_the_first_start_passes_over_what_is_there(node: Node) -> None:
    """Installed on a running node, the agent does not take weeks of old errors for new ones."""
    node.say(XID_79)
    agent = node.agent()
    assert codes(read(agent)) == []
    node.say(XID_31)
    assert codes(read(agent)) == [31]


def test_a_restart_neither_repeats_nor_misses(node: Node) -> None:
    """After a restart old Xids stay old, and one that came meanwhile is reported with the time it happened."""
    agent = node.agent()
    node.say("hello")
    read(agent)
    node.say(XID_31)
    assert codes(read(agent)) == [31]
    node.clock.advance(10)
    node.say(XID_79)
    node.clock.advance(50)
    reading = read(node.agent())
    assert [(event.data["code"], event.at) for event in reading.events] == [(79, 50_010.0)]


def test_after_a_reboot_the_whole_log_is_news(node: Node) -> None:
    """The position of another boot is worth nothing, and errors while booting are reported."""
    agent = node.agent()
    for _ in range(5):
        node.say("hello")
    read(agent)
    node.boot()
    node.say(XID_79)
    assert codes(read(node.agent())) == [79]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"boot_id": "boot-1"}', '{"boot_id": "boot-1", "sequence": null}'])
def test_a_damaged_position_is_a_first_start(node: Node, content: str) -> None:
    """A position file that makes no sense replays nothing and is written again."""
    node.say(XID_79)
    node.state.write_text(content)
    assert codes(read(node.agent())) == []
    node.say(XID_31)
    assert codes(read(node.agent())) == [31]


def test_a_position_that_cannot_be_kept_is_visible(node: Node) -> None:
    """A state folder that cannot be written blinds nobody and shows in a metric and in the collector's state."""
    node.state = node.folder / "missing" / "kmsg.json"
    agent = node.agent()
    node.say("hello")
    read(agent)
    node.say(XID_31)
    reading = read(agent)
    assert codes(reading) == [31]
    assert values(reading, "opsd_kmsg_position_kept") == {(): 0}
    assert isinstance(reading, Reading) and reading.limited.endswith("cannot be written: No such file or directory")
    node.state.parent.mkdir()
    node.say("hello")
    assert values(read(agent), "opsd_kmsg_position_kept") == {(): 1}


def test_a_planted_link_is_not_followed(node: Node) -> None:
    """The position is written beside its place and renamed; a link planted there is replaced, its target untouched."""
    target = node.folder / "target"
    target.write_text("precious")
    (node.folder / ".kmsg.json.new").symlink_to(target)
    agent = node.agent()
    read(agent)
    node.say("hello")
    assert values(read(agent), "opsd_kmsg_position_kept") == {(): 1}
    assert target.read_text() == "precious"


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=20), limit=st.integers(1, 4))
def test_any_mix_of_restarts_reports_everything_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, int]], limit: int
) -> None:
    """However reading and restarting alternate, each Xid is reported exactly once and in order."""
    node = Node(tmp_path_factory.mktemp("node"))
    agent, said = node.agent(max_records=limit), 0
    seen: list[object] = []
    read(agent)
    node.say("hello")
    read(agent)
    for restart, messages in steps:
        for _ in range(messages):
            node.say(f"NVRM: Xid (PCI:0000:3b:00): {said}, pid={said}, name=x, y")
            said += 1
        if restart:
            agent = node.agent(max_records=limit)
        seen += codes(read(agent))
    for _ in range(said + 1):
        seen += codes(read(agent))
    assert seen == list(range(said))


def test_a_live_event_is_not_older_than_the_last_look(node: Node) -> None:
    """The log's clock drifts from the machine's; an event is dated between the last look and now, whatever it says."""
    agent = node.agent()
    read(agent)
    node.clock.advance(1)
    node.say(XID_31, seconds=700.0)
    node.say(XID_79, seconds=1300.0)
    assert [event.at for event in read(agent).events] == [50_000.0, 50_001.0]


def test_a_clock_stepped_by_an_hour_moves_events_with_it(node: Node) -> None:
    """Events are dated by the wall clock of the moment they are read."""
    agent = node.agent()
    read(agent)
    node.clock.wall_now += 3600
    node.say(XID_31)
    (event,) = read(agent).events
    assert event.at == node.clock.wall()


# The kernel log's records and device: any bytes, a missing device, a ring that overwrites what was not read.


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
