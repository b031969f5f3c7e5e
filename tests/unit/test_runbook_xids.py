"""How often an Xid came, and what that means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import Event
from opsd.runbooks.lib.xids import bursts, too_often


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
