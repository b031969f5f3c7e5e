"""Huge pages from a fixture tree in the form of /proc."""

from __future__ import annotations

from pathlib import Path

from opsd.collectors.base import NoData, Reading
from opsd.collectors.hugepages import HugepagesCollector, parse_hugepages

MEMINFO = """\
MemTotal:       131072000 kB
AnonHugePages:      2048 kB
HugePages_Total:      10
HugePages_Free:        6
HugePages_Rsvd:        1
HugePages_Surp:        0
Hugepagesize:       2048 kB
Hugetlb:           20480 kB
"""


def test_pages_are_counted_in_bytes(tmp_path: Path) -> None:
    """The kernel counts pages, the series have bytes."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    reading = HugepagesCollector(tmp_path).collect()
    assert isinstance(reading, Reading)
    assert {(sample.metric.name, *sample.labels): sample.value for sample in reading.samples} == {
        ("opsd_hugepages_total_bytes",): 10 << 21,
        ("opsd_hugepages_state_bytes", "free"): 6 << 21,
        ("opsd_hugepages_state_bytes", "reserved"): 1 << 21,
        ("opsd_hugepages_state_bytes", "surplus"): 0,
    }


def test_a_kernel_without_huge_pages_has_no_data(tmp_path: Path) -> None:
    """As one built without CONFIG_HUGETLBFS."""
    (tmp_path / "meminfo").write_text("MemTotal:       131072000 kB\n")
    assert isinstance(HugepagesCollector(tmp_path).collect(), NoData)
    assert parse_hugepages("") is None
