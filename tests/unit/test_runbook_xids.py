"""How often an Xid came, and what that means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.window import Window
from opsd.collectors.base import Event, GpuFact, Reading, Sample
from opsd.collectors.lib.kernel.xid import Xid, xid_event
from opsd.collectors.lib.kernel.xid_catalogue import CATALOGUE, XidAction
from opsd.collectors.lib.nvml.series import RECOVERY_ACTION
from opsd.runbooks import gpu_xid
from opsd.runbooks.lib.xids import bursts, too_often
from tests.fakes.incidents import incident

GPU = GpuFact(0, "GPU-0", "00000000:1A:00.0", "H100")
NOW = 1_000_000.0
REMEDIES = (
    {"none", "ignore"},
    {"restart_app"},
    {"update_software", "workflow", "contact_support"},
    {"drain_p2p", "recover_imex_domain"},
    {"reset_gpu", "drain_and_reset"},
    {"restart_vm", "reboot_node"},
    {"check_mechanicals", "replace_board"},
    {"diagnostics"},
)
VERDICTS = ("reset_gpu", "reboot_node", "drain_p2p", "replace_board")


def xids(code, times):
    return [Event("xid", at, "", {"code": code, "pci_bus_id": "00000000:1A:00.0"}) for at in times]


def test_xids_within_a_minute_are_one_burst():
    """A fault that is told twenty times has happened once."""
    assert bursts(xids(13, [0, 1, 2, 50, 105]), 13) == 1
    assert bursts(xids(13, [0, 61, 300]), 13) == 3
    assert bursts(xids(13, [0]), 31) == 0


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=30))
def test_bursts_depend_on_the_times_only(times):
    """There is at least one burst, never more than events, and their order does not matter."""
    count = bursts(xids(13, times), 13)
    assert 1 <= count <= len(times)
    assert bursts(xids(13, reversed(times)), 13) == count


@pytest.mark.parametrize(
    ("code", "times", "expected"),
    [
        (31, [0, 3600], True),
        (31, [0, 30], False),
        (13, [0, 3600], False),
        (13, [0, 3600, 7200, 10800, 14400], True),
        (45, [0, 3600, 7200, 10800, 14400], False),
    ],
)
def test_page_faults_count_early_and_echoes_never(code, times, expected):
    """Two page faults or five other bursts in a day call for diagnostics; 45 tells of something else each time."""
    assert too_often(xids(code, times), code) is expected


def remedy(action: str) -> int:
    return next(number for number, actions in enumerate(REMEDIES) if action in actions)


def found(xids: list[tuple[float, Xid]], *others: Event, driver: bool = True) -> str:
    """What the runbook asks for, "none" without a finding; ages in seconds."""
    window = Window("n01")
    window.begin(100.0, NOW)
    events = [xid_event(xid, at=NOW - age, source="kmsg") for age, xid in sorted(xids, key=lambda one: -one[0])]
    window.add("kmsg", Reading(events=(*events, *others)))
    if driver:
        window.add("nvml", Reading(facts=(GPU,)))
    findings = list(gpu_xid.RUNBOOK.detect(window))
    return str(findings[0].data["action"]) if findings else "none"


def an_xid(code: int, verdict: str = "") -> Xid:
    return Xid(code, GPU.pci_bus_id, verdict=verdict)


@pytest.mark.parametrize("mild", [13, 31, 32, 43, 45, 94])
@pytest.mark.parametrize("fatal", [46, 48, 62, 64, 79, 95, 119, 140, 143, 154])
def test_a_mild_xid_takes_nothing_back(mild, fatal):
    """In both orders, and hours apart, the fatal one decides."""
    severe = an_xid(fatal, "reset_gpu" if fatal == 154 else "")
    for ages in ((2, 1), (1, 2), (20_000, 1)):
        assert found(list(zip(ages, (severe, an_xid(mild)), strict=True))) == str(severe.action), ages


DETAILS = (
    "pid=123, name=python, Ch 00000008",
    "SAW_MVB NON_FATAL: Link 3 (0x1 0x2 0x3)",
    "RLW_RXPIPE Fatal XC1 i0 Link 02 (0x00000008 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
    "NETIR_LINK_DOWN Fatal XC0 i0 Link 12 (0x00000004 0x00000000 0x1 0x2 0x0 0x0)",
    "NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    "",
)


@given(st.data(), st.booleans())
def test_more_evidence_is_never_a_lesser_verdict(data, driver):
    """Any mixture of the catalogue and of 154, in any order, in bursts and at once, with and without the driver."""
    codes = st.builds(
        lambda code, detail: Xid(code, GPU.pci_bus_id, detail=detail),
        st.sampled_from([*(code for code in CATALOGUE if code != 154), 999]),
        st.sampled_from(DETAILS),
    )
    verdicts = st.builds(an_xid, st.just(154), st.sampled_from(VERDICTS))
    ages = st.sampled_from((0, 1, 30, 59, 61, 299, 301, 599, 601, 1801, 7200, 80_000))
    xids = data.draw(st.lists(st.tuples(ages, st.one_of(codes, verdicts)), min_size=1, max_size=7))
    fewer = [xid for xid in xids if data.draw(st.booleans())]
    assert remedy(found(xids, driver=driver)) >= remedy(found(fewer, driver=driver))


@pytest.mark.parametrize(
    ("asked", "healed"), [(None, False), (0.0, True), (1.0, False)], ids=["says nothing", "nothing", "reset"]
)
def test_a_reset_that_nobody_has_done_is_not_over_after_a_day(asked, healed):
    """Time heals no GPU: only a driver that asks for nothing."""
    window = Window("n01")
    for now in (99.0, 100.0):
        window.begin(now, NOW + now - 100)
        samples = () if asked is None else (Sample(RECOVERY_ACTION, asked, ("0", GPU.uuid)),)
        window.add("nvml", Reading(samples=samples, facts=(GPU,)))
    data = {"pci": GPU.pci_bus_id, "uuid": GPU.uuid, "action": "reset_gpu", "at": NOW - 90_000}
    opened = incident("gpu_xid-1", kind="gpu_xid", data=data, opened_at=NOW - 90_000)
    assert gpu_xid.RUNBOOK.healed(opened, window) is healed


@pytest.mark.parametrize("proof", ["driver loaded", "verdict none"])
def test_only_health_ends_an_episode(proof):
    """After a reset a mild Xid is only that."""
    well = Event("gpu_driver_loaded", NOW - 100, "", {})
    xids = [(200.0, an_xid(95)), (1.0, an_xid(13))]
    if proof == "verdict none":
        xids.append((100.0, an_xid(154, "none")))
    assert found(xids, *([well] if proof == "driver loaded" else [])) == XidAction.RESTART_APP
    assert found(xids[:1], *([well] if proof == "driver loaded" else [])) != XidAction.RESTART_APP
