"""Ports that are chosen now and bound later."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest

from opsd.ports import MOST_MARKED, ReservedPort, free_port


def test_a_free_port_can_be_bound() -> None:
    """Also without SO_REUSEADDR, and it is outside the range of ports for outgoing connections."""
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    assert port < 32_768


def test_a_reserved_port_is_chosen_by_nobody_else() -> None:
    """Neither by this process nor by another, until it is given back."""
    first = 15_000  # other tests draw from the usual range
    reserved = ReservedPort(first, first + 1_000)
    only = (reserved.number, reserved.number + 1)
    with pytest.raises(OSError, match="no free TCP port"):
        ReservedPort(*only)
    choose = f"from opsd.ports import ReservedPort\nprint(ReservedPort{only}.number)"
    other = subprocess.run([sys.executable, "-c", choose], capture_output=True, text=True)
    assert "no free TCP port" in other.stderr
    del reserved
    assert ReservedPort(*only).number == only[0]


def test_who_marks_all_ports_leaves_them_to_others() -> None:
    """Any user can, and bind none of them."""
    first = 16_500
    with ExitStack() as ending:
        for number in range(first, first + MOST_MARKED + 2):
            mark = ending.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            with suppress(OSError):
                mark.bind(f"\0opsd-port-{number}")
        assert ReservedPort(first, first + MOST_MARKED + 2).number >= first


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    """Somebody who reserved nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="no free TCP port"):
            ReservedPort(port, port + 1)
