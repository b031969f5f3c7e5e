"""What a launcher says of the IMEX daemon of its node before a run on several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.launch.run.nvlink_domain import imex_problem

DOMAIN = "5e797fc6-0f46-421a-8724-0e102c0f723c.1"


@pytest.mark.parametrize(
    ("script", "domain", "said"),
    [
        ("echo READY", DOMAIN, ""),
        ("echo WAITING_FOR_PEERS", DOMAIN, "is WAITING_FOR_PEERS, not READY"),
        ("echo UNAVAILABLE", "", "is UNAVAILABLE, not READY"),
        ("echo connection refused >&2; exit 1", DOMAIN, "cannot be asked: connection refused"),
        ("exit 3", DOMAIN, "cannot be asked: exit code 3"),
        ("exec sleep 60", DOMAIN, "cannot be asked: no answer within 1.5 s"),
        ("echo connection refused >&2; exit 1", "", ""),
    ],
)
def test_a_daemon_that_is_not_ready_is_told(tmp_path: Path, script: str, domain: str, said: str) -> None:
    """One that gives no answer is unknown: it is told only on a node that shares an NVLink domain."""
    control = tmp_path / "nvidia-imex-ctl"
    control.write_text(f'#!/bin/sh\n[ "$*" = -q ] || exit 9\n{script}\n')
    control.chmod(0o755)
    problem = imex_problem(domain, control)
    assert said in problem
    assert bool(problem) is bool(said)


def test_a_node_without_the_tool_has_no_daemon_to_speak_of(tmp_path: Path) -> None:
    """Unless it shares a domain: then its GPUs reach no others."""
    assert imex_problem("", tmp_path / "none") == ""
    assert "is not there" in imex_problem(DOMAIN, tmp_path / "none")
