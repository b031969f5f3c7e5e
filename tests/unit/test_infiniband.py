"""InfiniBand, RoCE and EFA ports: what sysfs shows, and what happened between two looks."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import NoData, Reading
from opsd.collectors.infiniband import (
    ACTIVE,
    FILES,
    METRICS,
    InfinibandCollector,
    InfinibandSettings,
    LinkHistory,
    PortReading,
    parse_rate,
    parse_state,
)
from tests.fakes.clock import FakeClock
from tests.fakes.tree import write_tree

NDR = {
    "fw_ver": "28.41.1000",
    "board_id": "MT_0000000838",
    "ports/1/state": "4: ACTIVE",
    "ports/1/phys_state": "5: LinkUp",
    "ports/1/rate": "400 Gb/sec (4X NDR)",
    "ports/1/link_layer": "InfiniBand",
    "ports/1/counters/port_xmit_data": 1000,
    "ports/1/counters/port_rcv_data": 2000,
    "ports/1/counters/port_xmit_wait": 7,
    "ports/1/counters/symbol_error": 3,
    "ports/1/counters/link_downed": 1,
    "ports/1/counters/multicast_rcv_packets": 99,
    "ports/1/hw_counters/out_of_sequence": 5,
    "ports/1/hw_counters/np_cnp_sent": 6,
    "ports/1/hw_counters/lifespan": 10,
}
EFA = {
    "ports/1/state": "4: ACTIVE",
    "ports/1/phys_state": "5: LinkUp",
    "ports/1/rate": "100 Gb/sec (4X EDR)",
    "ports/1/link_layer": "Unspecified",
    "ports/1/hw_counters/tx_bytes": 123,
    "ports/1/hw_counters/rx_bytes": 456,
    "ports/1/hw_counters/rx_drops": 2,
    "ports/1/hw_counters/retrans_timeout_events": 4,
}


class Fabric:
    """A node's RDMA devices below ``root``, looked at with ``look``."""

    def __init__(self, root: Path) -> None:
        self.root = root / "infiniband"
        self.clock = FakeClock()
        self.configure()
        write_tree(self.root / "mlx5_0", NDR)

    def configure(self, **settings: object) -> None:
        """Look with a new collector of these settings."""
        self.collector = InfinibandCollector(
            self.root,
            clock=self.clock.monotonic,
            wall=self.clock.wall,
            settings=InfinibandSettings.model_validate(settings),
        )

    def set(self, **files: str | int) -> None:
        """Change files of port 1 of mlx5_0; ``__`` stands for a slash."""
        write_tree(self.root / "mlx5_0/ports/1", {name.replace("__", "/"): text for name, text in files.items()})

    def look(self, after_s: float = 1.0) -> Reading:
        self.clock.advance(after_s)
        reading = self.collector.collect()
        assert isinstance(reading, Reading)
        return reading


@pytest.fixture
def fabric(tmp_path: Path) -> Fabric:
    return Fabric(tmp_path)


def values(reading: Reading, metric: str) -> dict[tuple[str, ...], float]:
    return {sample.labels: sample.value for sample in reading.samples if sample.metric.name == metric}


def kinds(reading: Reading) -> list[str]:
    return [event.kind for event in reading.events]


def test_a_port_in_good_order(fabric: Fabric) -> None:
    """State, rate, traffic, errors and congestion of an InfiniBand port, in base units; nothing happened."""
    reading = fabric.look()
    port = ("mlx5_0", "1")
    assert values(reading, "opsd_ib_port_state") == {port: 4}
    assert values(reading, "opsd_ib_port_physical_state") == {port: 5}
    assert values(reading, "opsd_ib_port_rate_bytes_per_second") == {port: 50e9}
    assert values(reading, "opsd_ib_transmitted_bytes_total") == {port: 4000}
    assert values(reading, "opsd_ib_received_bytes_total") == {port: 8000}
    assert values(reading, "opsd_ib_transmit_wait_ticks_total") == {port: 7}
    assert values(reading, "opsd_ib_errors_total") == {
        (*port, "symbol_error"): 3,
        (*port, "link_downed"): 1,
        (*port, "out_of_sequence"): 5,
    }
    assert values(reading, "opsd_ib_congestion_events_total") == {(*port, "np_cnp_sent"): 6}
    assert values(reading, "opsd_ib_link_flaps_total") == {port: 0}
    assert reading.events == ()


def test_what_a_port_is(fabric: Fabric) -> None:
    """The info series names link layer, firmware, board and PCI address."""
    pci = fabric.root.parent / "devices/0000:5c:00.0"
    pci.mkdir(parents=True)
    (fabric.root / "mlx5_0/device").symlink_to(pci)
    (labels,) = values(fabric.look(), "opsd_ib_port_info")
    assert labels == ("mlx5_0", "1", "InfiniBand", "28.41.1000", "MT_0000000838", "00000000:5C:00.0")


def test_efa_has_its_own_counters(fabric: Fabric) -> None:
    """An EFA device, which has no counters folder, shows its traffic and losses under the same names."""
    write_tree(fabric.root / "rdmap16s27", EFA)
    reading = fabric.look()
    port = ("rdmap16s27", "1")
    assert values(reading, "opsd_ib_transmitted_bytes_total")[port] == 123
    assert values(reading, "opsd_ib_errors_total")[*port, "rx_drops"] == 2


def test_a_link_goes_down_and_comes_back(fabric: Fabric) -> None:
    """A lost link and its return are events, and one flap although the hardware counts it too."""
    fabric.look()
    fabric.set(state="1: DOWN", phys_state="2: Polling", rate="10 Gb/sec (4X SDR)")
    (down,) = fabric.look().events
    assert (down.kind, down.message) == ("ib_link_down", "port 1 of mlx5_0 lost its link")
    assert {"device": "mlx5_0", "port": "1", "state": 1, "physical_state": 2}.items() <= down.data.items()
    fabric.set(counters__link_downed=2)
    assert kinds(fabric.look()) == []
    fabric.set(state="4: ACTIVE", phys_state="5: LinkUp", rate="400 Gb/sec (4X NDR)")
    reading = fabric.look()
    (up,) = reading.events
    assert (up.kind, up.data["down_s"]) == ("ib_link_up", 2.0)
    assert values(reading, "opsd_ib_link_flaps_total") == {("mlx5_0", "1"): 1}


def test_a_flap_between_two_looks_is_seen(fabric: Fabric) -> None:
    """A link that was lost and back before the next look shows in the hardware's count."""
    fabric.look()
    fabric.set(counters__link_downed=3)
    reading = fabric.look()
    (event,) = reading.events
    assert (event.kind, event.data["count"]) == ("ib_link_flap", 2)
    assert values(reading, "opsd_ib_link_flaps_total") == {("mlx5_0", "1"): 2}


def test_a_port_without_a_link_has_no_rate(fabric: Fabric) -> None:
    """It shows that of one slow lane, which is not the rate of its link."""
    fabric.set(state="2: INIT", rate="10 Gb/sec (4X SDR)")
    assert values(fabric.look(), "opsd_ib_port_rate_bytes_per_second") == {}


def test_a_link_whose_loss_is_deferred_is_a_link(fabric: Fabric) -> None:
    """ACTIVE_DEFER is the state of a port whose signal has been bad for a moment."""
    fabric.look()
    fabric.set(state="5: ACTIVE_DEFER")
    reading = fabric.look()
    assert kinds(reading) == []
    assert values(reading, "opsd_ib_port_state") == {("mlx5_0", "1"): ACTIVE}
    assert values(reading, "opsd_ib_port_rate_bytes_per_second") == {("mlx5_0", "1"): 50e9}


def test_the_site_says_which_ports_it_expects(fabric: Fabric) -> None:
    """Expected ports have a series of their own, also one that has never been there; others are left out on request."""
    write_tree(fabric.root / "mlx5_1", NDR)
    write_tree(fabric.root / "mlx5_bond_0", NDR)
    fabric.configure(expect=["mlx5_0/1", "mlx5_[1-7]", "mlx5_8"], expect_gbps=400.0, leave_out=["mlx5_bond_*"])
    reading = fabric.look()
    assert values(reading, "opsd_ib_port_expected_rate_bytes_per_second") == {
        ("mlx5_0", "1"): 50e9,
        ("mlx5_1", "1"): 50e9,
        ("mlx5_8", "1"): 50e9,
    }
    assert values(reading, "opsd_ib_port_state") == {("mlx5_0", "1"): 4, ("mlx5_1", "1"): 4, ("mlx5_8", "1"): 0}


def test_a_node_whose_only_adapter_is_missing_is_not_without_data(fabric: Fabric) -> None:
    """The configuration expects a port, and there is no device at all."""
    shutil.rmtree(fabric.root)
    fabric.configure(expect=["mlx5_0"])
    assert values(fabric.look(), "opsd_ib_port_state") == {("mlx5_0", "1"): 0}


def test_a_port_that_was_never_up_is_no_event(fabric: Fabric) -> None:
    """An unused port shows as down and nothing more."""
    fabric.set(state="1: DOWN")
    assert [kinds(fabric.look()) for _ in range(2)] == [[], []]


def test_a_slower_link_is_an_event(fabric: Fabric) -> None:
    """A link that trained at another rate says from what to what."""
    fabric.look()
    fabric.set(rate="200 Gb/sec (2X NDR)")
    (event,) = fabric.look().events
    assert (event.kind, event.message) == (
        "ib_rate_changed",
        "port 1 of mlx5_0 changed its rate from 400 to 200 Gbit/s",
    )
    assert event.data["after_bytes_per_second"] == 25e9


def test_a_device_that_vanishes_and_returns(fabric: Fabric) -> None:
    """A device that is gone is an event and a state of 0, not an absence of data; so is its return."""
    fabric.look()
    shutil.rmtree(fabric.root / "mlx5_0")
    reading = fabric.look()
    assert kinds(reading) == ["ib_port_gone"]
    assert values(reading, "opsd_ib_port_state") == {("mlx5_0", "1"): 0}
    assert kinds(fabric.look()) == []
    write_tree(fabric.root / "mlx5_0", NDR)
    reading = fabric.look()
    assert kinds(reading) == ["ib_port_back", "ib_link_up"]
    assert values(reading, "opsd_ib_link_flaps_total") == {("mlx5_0", "1"): 1}


def test_counters_that_start_over_or_wrap_keep_growing(fabric: Fabric) -> None:
    """A driver reload and a 32-bit wrap neither lower a total nor add a false burst."""
    fabric.set(counters__port_xmit_wait=4294967290)
    fabric.look()
    fabric.set(counters__port_xmit_wait=4, counters__port_xmit_data=10)
    reading = fabric.look()
    assert values(reading, "opsd_ib_transmit_wait_ticks_total") == {("mlx5_0", "1"): 4294967300}
    assert values(reading, "opsd_ib_transmitted_bytes_total") == {("mlx5_0", "1"): 4040}


@pytest.mark.parametrize("name", ["state", "phys_state", "rate", "counters/symbol_error", "hw_counters/np_cnp_sent"])
@pytest.mark.parametrize("how", ["gone", "empty", "nonsense", "binary", "unreadable"])
def test_a_file_that_fails_costs_only_its_own_series(fabric: Fabric, name: str, how: str) -> None:
    """A file that vanished, is empty, makes no sense or cannot be read is left out; the rest is there."""
    complete = len(fabric.look().samples)
    file = fabric.root / "mlx5_0/ports/1" / name
    file.unlink()
    if how == "unreadable":
        file.mkdir()
    elif how != "gone":
        file.write_bytes({"empty": b"", "nonsense": b"-1 Gb: x", "binary": b"\\xff\\x00\\xb2"}[how])
    reading = fabric.look()
    assert kinds(reading) == []
    assert len(reading.samples) == complete - (2 if name == "state" else 1)  # no rate without a known link


def test_no_device_is_no_data(tmp_path: Path) -> None:
    """A node without RDMA has no data, whether the class is missing or empty."""
    assert isinstance(InfinibandCollector(tmp_path / "missing").collect(), NoData)
    assert isinstance(InfinibandCollector(tmp_path).collect(), NoData)


def test_ports_are_bounded(tmp_path: Path) -> None:
    """A node with hundreds of virtual functions has a bounded number of series."""
    for index in range(5):
        write_tree(tmp_path / f"mlx5_{index}", NDR)
    reading = InfinibandCollector(tmp_path, max_ports=2).collect()
    assert isinstance(reading, Reading)
    assert len(values(reading, "opsd_ib_port_state")) == 2


def test_the_ports_of_this_machine() -> None:
    """The real sysfs gives ports or says that there are none."""
    reading = InfinibandCollector().collect()
    assert isinstance(reading, NoData) or values(reading, "opsd_ib_port_state")


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """States and rates are numbers or ValueError."""
    for parse in (parse_state, parse_rate):
        with contextlib.suppress(ValueError):
            assert isinstance(parse(text), int | float)


looks = st.tuples(st.sampled_from([1, 2, 4, None]), st.integers(0, 3), st.booleans())


@given(st.lists(looks))
def test_flaps_are_bounded_by_what_was_seen(history: list[tuple[int | None, int, bool]]) -> None:
    """Whatever a link does: flaps never fall, and are never more than losses seen and counted together."""
    link, downed, seen, before = LinkHistory(), 0, 0, 0
    for now, (state, more, present) in enumerate(history):
        downed += more
        reading = PortReading(state, None, 50e9 if state == ACTIVE else None, {})
        happened = link.update(reading, downed, now) if present else link.gone(now)
        seen += sum(entry.kind in ("ib_link_down", "ib_port_gone") for entry in happened)
        assert before <= link.flaps <= downed + seen
        before = link.flaps


def test_every_counter_file_has_a_metric() -> None:
    """The table of files leads only to metrics that the collector names."""
    assert {counter.metric for counter in FILES.values()} <= set(METRICS)
