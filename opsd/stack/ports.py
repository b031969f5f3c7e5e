"""Simulated InfiniBand ports in a folder like /sys/class/infiniband."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_STATE: Final = {
    "link_layer": "InfiniBand",
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
}
_COUNTERS: Final = (
    "VL15_dropped", "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery",
    "local_link_integrity_errors", "multicast_rcv_packets", "multicast_xmit_packets", "port_rcv_constraint_errors",
    "port_rcv_data", "port_rcv_errors", "port_rcv_packets", "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors", "port_xmit_constraint_errors", "port_xmit_data", "port_xmit_discards",
    "port_xmit_packets", "port_xmit_wait", "symbol_error", "unicast_rcv_packets", "unicast_xmit_packets",
)  # fmt: skip
_HW_COUNTERS: Final = (
    "duplicate_request", "implied_nak_seq_err", "lifespan", "local_ack_timeout_err", "np_cnp_sent",
    "np_ecn_marked_roce_packets", "out_of_buffer", "out_of_sequence", "packet_seq_err", "req_cqe_error",
    "req_cqe_flush_error", "req_remote_access_errors", "req_remote_invalid_request", "resp_cqe_error",
    "resp_cqe_flush_error", "resp_local_length_error", "resp_remote_access_errors", "rnr_nak_retry_err",
    "roce_adp_retrans", "roce_adp_retrans_to", "roce_slow_restart", "roce_slow_restart_cnps",
    "roce_slow_restart_trans", "rp_cnp_handled", "rp_cnp_ignored", "rx_atomic_requests", "rx_icrc_encapsulated",
    "rx_read_requests", "rx_write_requests",
)  # fmt: skip


class Port:
    """Port 1 of a ConnectX-7: a folder with the files of its driver. ``device`` must not exist yet."""

    def __init__(self, device: Path) -> None:
        self._folder = device / "ports" / "1"
        self._words = 0
        counters = [f"counters/{name}" for name in _COUNTERS] + [f"hw_counters/{name}" for name in _HW_COUNTERS]
        for group in ("counters", "hw_counters"):
            (self._folder / group).mkdir(parents=True)
        for name, text in (_STATE | dict.fromkeys(counters, "0")).items():
            (self._folder / name).write_text(f"{text}\n")

    def carry(self, data: int) -> None:
        """Count ``data`` bytes sent and received, in words of four bytes like the hardware."""
        self._words += data // 4
        for name in ("port_xmit_data", "port_rcv_data"):
            (self._folder / "counters" / name).write_text(f"{self._words}\n")
