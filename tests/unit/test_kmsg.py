"""The kernel log: what stands in it becomes events and counts, each thing once."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.collectors.lib.kernel.xid import COUNTED
from tests.fakes.kmsg import FALLEN, GPU, XID_31, XID_79, Node, codes, read, values


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
