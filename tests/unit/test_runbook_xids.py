"""How often an Xid came, and what that means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.window import Window
from opsd.collectors.base import Event, GpuFact, Reading
from opsd.collectors.lib.kernel.xid import Xid, xid_event
from opsd.collectors.lib.kernel.xid_catalogue import CATALOGUE, XidAction
from opsd.runbooks import gpu_xid
from opsd.runbooks.lib.xids import ECHOES, bursts, too_often

GPU = GpuFact(0, "GPU-0", "00000000:1A:00.0", "H100")
NOW = 1_000_000.0
LADDER = (
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


def rung(action: str) -> int:
    return next(number for number, actions in enumerate(LADDER) if action in actions)


def found(xids: list[tuple[float, Xid]], *others: Event) -> str:
    """What the runbook asks for, "none" without a finding; ages in seconds."""
    window = Window("n01")
    window.begin(100.0, NOW)
    events = [xid_event(xid, at=NOW - age, source="kmsg") for age, xid in sorted(xids, key=lambda one: -one[0])]
    window.add("kmsg", Reading(events=(*events, *others)))
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


@given(st.data())
def test_more_evidence_is_never_a_lesser_verdict(data):
    """Whatever comes beside it, before or after; each Xid a burst of its own, the newest just now."""
    codes = st.builds(an_xid, st.sampled_from([code for code in CATALOGUE if code not in ECHOES]))
    verdicts = st.builds(an_xid, st.just(154), st.sampled_from(VERDICTS))
    ages = st.lists(st.integers(1, 1000), min_size=1, max_size=8, unique=True)
    xids = [(61.0 * age, data.draw(st.one_of(codes, verdicts))) for age in data.draw(ages)]
    newest = (1.0, an_xid(45))
    fewer = data.draw(st.lists(st.sampled_from(xids), unique=True))
    assert rung(found([*xids, newest])) >= rung(found([*fewer, newest]))


@pytest.mark.parametrize("proof", ["driver loaded", "verdict none"])
def test_only_health_ends_an_episode(proof):
    """After a reset a mild Xid is only that."""
    well = Event("gpu_driver_loaded", NOW - 100, "", {})
    xids = [(200.0, an_xid(95)), (1.0, an_xid(13))]
    if proof == "verdict none":
        xids.append((100.0, an_xid(154, "none")))
    assert found(xids, *([well] if proof == "driver loaded" else [])) == XidAction.RESTART_APP
    assert found(xids[:1], *([well] if proof == "driver loaded" else [])) != XidAction.RESTART_APP
