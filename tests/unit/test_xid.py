"""Xids and SXids: what the driver writes becomes what is known about the error, once per error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import Sample
from opsd.collectors.lib.kernel.xid import (
    CATALOGUE,
    COUNTED,
    Sxid,
    Xid,
    XidAction,
    XidLedger,
    parse_sxid,
    parse_xid,
    xid_event,
)
from opsd.collectors.lib.pci import bus_id

GPU = "00000000:3B:00.0"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
            Xid(79, GPU, 1234, "python", "GPU has fallen off the bus."),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            Xid(79, GPU, None, "", "GPU has fallen off the bus."),
        ),
        ("NVRM: Xid (0000:3b:00): 14, Channel 00000001", Xid(14, GPU, detail="Channel 00000001")),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=89, Ch 00000018", Xid(31, GPU, 89, "", "Ch 00000018")),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, pid=7194, name=python, Contained: CE User Channel (0x9).",
            Xid(94, GPU, 7194, "python", "Contained: CE User Channel (0x9).", mig="GPU-I:05"),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 45, pid=7, name=python, Ch 00000008 caused by previous Xid 48",
            Xid(45, GPU, 7, "python", "Ch 00000008 caused by previous Xid 48", caused_by=48),
        ),
    ],
)
def test_formats_of_the_driver(line: str, expected: Xid) -> None:
    """Every format that drivers have used gives code, GPU, process and the rest."""
    assert parse_xid(line) == expected


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("0x0 (None) to 0x1 (GPU Reset Required)", "reset_gpu"),
        ("0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)", "reboot_node"),
        ("0x0 (None) to 0x2 (OS Reboot)", "reboot_node"),
        ("0x0 (None) to 0x4 (Drain and Reset)", "drain_and_reset"),
        ("0x4 (Drain and Reset) to 0x0 (None)", "none"),
        ("0x0 (None) to 0x9 (Replace Board)", "replace_board"),
    ],
)
def test_the_driver_verdict_supersedes_the_catalogue(text: str, verdict: str) -> None:
    """Xid 154 carries the driver's own recovery action, whatever words the driver uses for it."""
    xid = parse_xid(f"NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from {text}")
    assert xid is not None
    assert (xid.verdict, xid.action) == (verdict, verdict)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        "NVRM: The NVIDIA GPU 0000:3b:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.",
    ],
)
def test_fallen_off_the_bus_is_xid_79(line: str) -> None:
    """A GPU that has fallen off the bus is Xid 79 even where the driver gives no number."""
    assert parse_xid(line) == Xid(79, GPU, inferred=True)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:3b:00): 7",
        "NVRM: Xid (PCI:0000:3b:0",
        "NVRM: Xid (PCI:0000:3b:00): abc, pid=1",
        "systemd[1]: said NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x22:0x56:742)",
    ],
)
def test_what_is_not_a_whole_xid_is_none(line: str) -> None:
    """A line cut off inside its number, a quotation, and other lines of the driver are no Xid."""
    assert parse_xid(line) is None


def test_sxid_with_severity_and_link() -> None:
    """An SXid says which switch, how severe and on which link."""
    line = "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)"
    assert parse_sxid(line) == Sxid(12028, "00000000:05:00.0", "non_fatal", 32, "egress non-posted PRIV error (First)")
    fatal = parse_sxid("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 60 sourcetrack timeout error")
    assert fatal is not None
    assert fatal.severity == "fatal"


@pytest.mark.parametrize("rest", ["Severity 1 Engine instance 60 Sub-engine instance 00", "Data {0x00140004, 0x0}"])
def test_the_details_after_an_sxid_are_not_sxids(rest: str) -> None:
    """The lines of data that follow each SXid do not count again."""
    assert parse_sxid(f"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, {rest}") is None


@given(st.text())
def test_any_text_can_be_parsed(text: str) -> None:
    """No text makes the parsers raise."""
    for prefix in ("", "NVRM: Xid (PCI:0000:3b:00): ", "NVRM: Xid (PCI:0000:3b:00): 154, ", "nvidia-nvswitch0: SXid "):
        parse_xid(prefix + text)
        parse_sxid(prefix + text)


def test_actions_of_the_reference() -> None:
    """The codes that drain nodes have the action of NVIDIA's catalogue."""
    expected = {79: XidAction.REBOOT_NODE, 63: XidAction.IGNORE, 94: XidAction.RESTART_APP}
    expected |= dict.fromkeys((46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158), XidAction.RESET_GPU)
    assert {code: CATALOGUE[code].action for code in expected} == expected
    assert set(COUNTED) <= set(CATALOGUE) == set(range(1, 173))
    assert Xid(999, GPU).action == XidAction.CONTACT_SUPPORT


@pytest.mark.parametrize(
    ("text", "action", "description"),
    [
        # The lines of NVLink 5 are from reports to leptonai/gpud, #1160 and #1174.
        ("144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008 0x00000000 0x00000000)", "ignore", "SAW_MVB"),
        ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001)", "ignore", "link 13, RLW_RXPIPE"),
        ("145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000004 0x00000001 0x00000000)", "restart_app", "refused"),
        ("145, RLW_REMAP Fatal XC0 i0 Link 00 (0x00000004 0x00000040 0x00000000)", "reset_gpu", "fatal"),
        ("149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 00 (0x00000013 0x00000001)", "ignore", "not fatal"),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x00000000)", "reset_gpu", "NETIR_LINK_EVT"),
        ("149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 14 (0x0215c5c6 0x00000000)", "reset_gpu", "link 14, NETIR_LINK_EVT"),
        ("149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x00000000)", "reset_gpu", "link -1, NETIR"),
        ("149, cut off", "workflow", "NVLink 5 error"),
        ("74, pid=9, name=a, NVLink: fatal error detected on link 6(0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", "ignore", "6"),
        ("74, NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", "reset_gpu", "seating"),
        ("74, NVLink: fatal error detected on link 6(0x200000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", "reset_gpu", "signal"),
        ("74, NVLink: fatal error detected on link 6(0x0, 0x0, 0x40, 0x0, 0x0, 0x0, 0x0)", "reset_gpu", "parity"),
        ("74, NVLink: fatal error detected on link 6(0x2, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", "workflow", "link 6"),
        ("74, NVLink: fatal error detected on link 6(0x1, 0x0, 0x0, 0x8, 0x0, 0x0, 0x0)", "workflow", "link 6"),
        ("165, Power Smoothing HW lifetime exhausted", "contact_support", "end of its life"),
    ],
)
def test_registers_say_more_than_the_code(text: str, action: str, description: str) -> None:
    """An error of NVLink is fatal or not by what its line carries; without that the catalogue's row holds."""
    xid = parse_xid(f"NVRM: Xid (PCI:0000:3b:00): {text}")
    assert xid is not None
    event = xid_event(xid, at=0.0, source="kmsg")
    assert event.data["action"] == action
    assert description in str(event.data["description"])


def test_event_says_what_is_known() -> None:
    """The event of an Xid carries code, GPU, action and process, and a sentence for people."""
    event = xid_event(Xid(31, GPU, 89, "python", "MMU Fault"), at=5.0, source="kmsg", count=3, where={"gpu": 2})
    assert (event.kind, event.at, event.message) == ("xid", 5.0, f"Xid 31 on {GPU} by python 89: MMU Fault")
    assert {"code": 31, "pci_bus_id": GPU, "action": "restart_app", "count": 3, "gpu": 2}.items() <= event.data.items()


def counts(ledger: XidLedger, *gpus: str) -> dict[tuple[str, ...], float]:
    ledger.expect(gpus)
    return {labels: value for _, value, labels in ledger.samples()}


def test_two_sources_of_one_xid_count_once() -> None:
    """What NVML and the kernel log both tell of is one Xid, in whichever order they tell."""
    ledger = XidLedger(window_s=10)
    assert ledger.report(31, GPU, at=100.0, source="nvml")
    assert not ledger.report(31, GPU, at=98.5, source="kmsg")
    assert counts(ledger)[GPU, "31"] == 1


def test_one_source_counts_every_xid() -> None:
    """Repetitions from the same source, other codes, other GPUs and later ones are Xids of their own."""
    ledger = XidLedger(window_s=10)
    assert ledger.report(31, GPU, at=100.0, source="kmsg")
    assert ledger.report(31, GPU, at=100.1, source="kmsg")
    assert ledger.report(13, GPU, at=100.1, source="nvml")
    assert ledger.report(31, "00000000:9B:00.0", at=100.1, source="nvml")
    assert ledger.newest(GPU) == 13
    assert ledger.report(31, GPU, at=111.0, source="nvml")
    assert counts(ledger)[GPU, "31"] == 3
    assert (ledger.newest(GPU), ledger.newest("00000000:FF:00.0")) == (31, 0)


def test_counters_start_at_zero() -> None:
    """Every counted code of a known GPU has a series before its first Xid, and codes beyond share one."""
    ledger = XidLedger()
    before = counts(ledger, GPU)
    assert before == {(GPU, code): 0 for code in (*map(str, COUNTED), "other")}
    ledger.report(141, GPU, at=0.0, source="kmsg")
    assert counts(ledger) == before | {(GPU, "other"): 1}


@given(st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 5000))))
def test_series_are_bounded(reports: list[tuple[int, int]]) -> None:
    """However many codes and addresses come, there are no more series than GPUs times codes, and none is lost."""
    ledger = XidLedger(max_gpus=4)
    for number, (code, slot) in enumerate(reports):
        ledger.report(code, f"{slot:08X}:00:00.0", at=float(number), source="kmsg")
    samples: list[Sample] = list(ledger.samples())
    assert len(samples) <= 5 * (len(COUNTED) + 1)
    assert sum(sample.value for sample in samples) == len(reports)


def test_pci_addresses_have_one_form() -> None:
    """The kernel's, sysfs' and NVML's spelling of an address are the same label."""
    assert {bus_id(a) for a in ("0000:3b:00", "0000:3b:00.0", "00000000:3B:00.0")} == {GPU}
