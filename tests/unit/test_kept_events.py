"""What kernel and drivers have told is known to the next agent as well."""

from opsd.agent.journal import Journal
from opsd.agent.window import Window
from opsd.collectors.base import Event, Reading

T0 = 1_700_000_000.0
XID = Event("xid", T0, "Xid 79", {"pci_bus_id": "00000000:3A:00.0", "code": 79})


def _journal(folder, boot=None):
    return Journal(folder, lambda _problem: None, wall=lambda: T0 + 60, boot=boot)


def _restarted(folder, *record, boot=None):
    before = _journal(folder, boot)
    before.open()
    for one in record:
        one(before)
    before.close()
    after = _journal(folder)
    content = after.open()
    after.close()
    return content.events


def test_an_event_of_a_witness_outlives_the_agent(tmp_path):
    """The kernel log is read once only, so that its events are nowhere else."""
    assert _restarted(tmp_path, lambda journal: journal.event(XID)) == (XID,)


def test_recorded_events_move_with_the_wall_clock(tmp_path):
    """An event that was recorded before a step is as old after it as it was before."""
    moved = _restarted(tmp_path, lambda journal: journal.event(XID), lambda journal: journal.clock_stepped(-3600.0))
    assert [event.at for event in moved] == [T0 - 3600.0]


def test_events_of_an_earlier_boot_are_left_out(tmp_path):
    """What was before a reboot proves nothing of the hardware now."""
    assert _restarted(tmp_path, lambda journal: journal.event(XID), boot="earlier") == ()


def test_the_window_tells_remembered_events_and_offers_only_what_witnesses_say_now():
    """What users write stands in their files and is read again; it must not fill the journal."""
    window = Window("node", seconds=60, witnesses=["kmsg"])
    window.begin(0.0, T0 + 60)
    window.remember([XID])
    said = Event("rank_exited", T0, "gone", {"run": "smol"}, user=1000)
    window.add("ranks", Reading(events=(said,)))
    window.add("kmsg", Reading(events=(XID,)))
    assert window.news == [XID]
    assert [*window.events("xid", 600.0)] == [XID, XID]
    assert [*window.witnessed.events("xid", 600.0)] == [XID, XID]
